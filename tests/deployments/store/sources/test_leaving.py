"""Downloads that are sent on, given up or too many: nothing leaves the allowed places, and nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.deployments.store.disk_tier import DiskTier
from app.deployments.store.sources.fetch_timeout import FetchTimeout
from app.deployments.store.sources.urls import UrlFetcher
from app.deployments.store.tier_counters import TierCounters
from app.engine.adapters.card import AdapterCard
from app.engine.errors import PolyloraError, SourceError, UnsafeSource
from tests.deployments.store.recorded_events import RecordedEvents
from tests.deployments.store.sources.conftest import OpenLibrary
from tests.deployments.store.sources.servers import FileServer


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def sends_on(server: FileServer, hops: dict[str, str]) -> None:
    """Paths that begin so are answered with the place where to look instead."""
    plain = server.answer

    def answer(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        for begin, target in hops.items():
            if path.startswith(begin):
                return 302, {"Location": target + path.removeprefix(begin)}, b""
        return plain(method, path)

    server.answer = answer


def web(*prefixes: str) -> UrlFetcher:
    return UrlFetcher(prefixes, options={}, max_bytes=1 << 20, timeout_s=60)


def test_a_web_server_may_send_on_within_what_is_allowed(
    open_library: OpenLibrary, server: FileServer, files: dict[str, bytes], card: AdapterCard
) -> None:
    server.files |= {f"/ok/deep/a/{name}": contents for name, contents in files.items()}
    sends_on(server, {"/ok/old/": "/ok/newer/", "/ok/newer/": f"{server.url}/ok/deep/"})
    located = open_library(web(f"{server.url}/ok/")).from_source(f"{server.url}/ok/old/a")
    assert located.packed.card == card


@pytest.mark.parametrize("number_of_hops", [1, 2])
@pytest.mark.parametrize(
    "target", ["other host", "/secret/", "/ok/../secret/", "/ok/%2e%2e/secret/", "//evil.example/ok/"]
)
def test_a_web_server_that_sends_elsewhere_is_not_followed(
    open_library: OpenLibrary, server: FileServer, files: dict[str, bytes], target: str, number_of_hops: int
) -> None:
    inside = FileServer()
    try:
        for other in (inside, server):
            other.files |= {f"/secret/a/{name}": contents for name, contents in files.items()}
        place = f"{inside.url}/secret/" if target == "other host" else target
        hops = {"/ok/": place} if number_of_hops == 1 else {"/ok/first/": "/ok/second/", "/ok/second/": place}
        sends_on(server, hops)
        path = "a" if number_of_hops == 1 else "first/a"
        with pytest.raises(PolyloraError) as caught:
            open_library(web(f"{server.url}/ok/")).from_source(f"{server.url}/ok/{path}")
        assert isinstance(caught.value, UnsafeSource), caught.value
        assert not inside.gets
        assert not any("secret" in path for path in server.gets)
    finally:
        inside.close()


class Late:
    """A library that goes on when nobody waits, and makes the folder again that was removed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.has_ended = threading.Event()

    def accepts(self, _: str) -> bool:
        return True

    def fetch(self, uri: str, folder: Path, tenant_id: str) -> str:  # noqa: ARG002
        self.begun.set()
        self.gate.wait(60)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(bytes(1000))
        self.has_ended.set()
        return uri


@pytest.mark.parametrize("why", ["time", "nobody wants it"])
def test_what_is_fetched_too_late_is_removed(tmp_path: Path, why: str) -> None:
    late = Late()
    tier = DiskTier(tmp_path, 10_000, "lru", TierCounters(), RecordedEvents())
    fetcher = FetchTimeout(late, 0.02 if why == "time" else 60.0)

    def fetch() -> None:
        with tier.staging("a") as folder:
            fetcher.fetch("x://host/a", folder, "default")

    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(fetch)
        assert late.begun.wait(60)
        if why != "time":
            fetcher.abandon("x://host/other")
            fetcher.abandon("x://host/a")
        with pytest.raises(SourceError, match=r"within adapters.source_timeout_s|was abandoned"):
            fetching.result()
    late.gate.set()
    assert late.has_ended.wait(60)
    until(lambda: not fetcher._hanging_calls._hanging["x://host"])
    assert list(tier._staging.iterdir()) == []
    assert fetcher._unwanted == {}
    tier.close()


def test_downloads_wait_until_their_bytes_fit_beside_the_others(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 100, "lru", TierCounters(), RecordedEvents())
    with ThreadPoolExecutor(1) as thread:
        with tier.staging("a") as one, tier.staging("a") as two, tier.staging("b") as three, tier.staging("c") as four:
            tier.reserve(one, 500)  # larger than all may be: the tenant's only one
            with pytest.raises(SourceError, match=r"no room for 10 bytes of adapters\.disk_cache_bytes 100"):
                tier.reserve(two, 10)
            tier.reserve(three, 40)  # another tenant's: half is left to it
            with pytest.raises(SourceError):
                tier.reserve(four, 20)
            tier.reserve(four, 10)
            waiting = thread.submit(tier.reserve, two, 10, 60.0)
            assert not waiting.done()
            tier._staged_bytes[one] = 30
            with tier._staging_changed:
                tier._staging_changed.notify_all()
            waiting.result()
            tier.reserve(two, 10)
            with pytest.raises(SourceError):
                tier.reserve(two, 1)
        assert (tier._staged_bytes, tier._staged_by) == ({}, {})
    tier.close()
