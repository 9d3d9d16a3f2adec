"""The host cache and the registry: one read however many ask, generations that only rise, memory that is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.deployments.adapter_store import AdapterStore, LocatedAdapter
from app.deployments.published import Published
from app.deployments.quarantine import FIRST_S, Quarantine
from app.deployments.registry.catalog import Catalog
from app.deployments.registry.database import Database, sqlite_url
from app.engine.adapters.lora import LoraAdapter
from app.engine.adapters.packing import PackedAdapter, pack_adapter
from app.engine.errors import (
    AdapterFormatError,
    AdapterMismatch,
    AdapterQuarantined,
    AdapterTooLarge,
    InvalidRequest,
    NotFound,
)
from tests.fakes import fake_adapter


def open_catalog(folder: Path) -> Catalog:
    return Catalog(Database(sqlite_url(folder / "c.sqlite"), "base"))


class Sources:
    """Where adapters come from: a dictionary, and a gate for slow ones."""

    def __init__(self) -> None:
        self.contents: dict[str, LoraAdapter] = {}
        self.reads: list[str] = []
        self.puts: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def read(self, source: str) -> LocatedAdapter:
        self.reads.append(source)
        if gate := self.gates.get(source):
            assert gate.wait(10)
        if source not in self.contents:
            raise AdapterFormatError(f"{source} is broken")
        uri = f"/canonical/{source}" if "/" not in source else source
        return LocatedAdapter(uri, pack_adapter(self.contents[source]))

    def put(self, packed: PackedAdapter) -> str:
        self.puts.append(packed.card.digest)
        return f"handle-{packed.card.digest}"


@pytest.fixture
def sources() -> Sources:
    return Sources()


@pytest.fixture
def store(tmp_path: Path, sources: Sources) -> Iterator[AdapterStore[str]]:
    store = AdapterStore(open_catalog(tmp_path), sources.read, sources.put, max_bytes=100, reserved_names=["base"])
    yield store
    store.close()


def add(sources: Sources, name: str, *, size: int = 40, as_name: str | None = None) -> LoraAdapter:
    adapter = fake_adapter(as_name or name, 8, size_bytes=size)
    sources.contents[name] = sources.contents[f"/canonical/{name}"] = adapter
    return adapter


async def test_simultaneous_first_requests_read_once(store: AdapterStore[str], sources: Sources) -> None:
    adapter = add(sources, "a")
    sources.gates["a"] = threading.Event()
    tasks = [asyncio.create_task(store.register("a", "a")) for _ in range(20)]
    await asyncio.sleep(0.02)
    tasks[3].cancel()
    sources.gates["a"].set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    entries = [result for result in results if not isinstance(result, BaseException)]
    assert len(entries) == 19
    assert sources.reads == ["a"]
    assert sources.puts == [adapter.card.digest]
    handles = await asyncio.gather(*(store.fetch(entries[0].ref) for _ in range(10)))
    assert set(handles) == {f"handle-{adapter.card.digest}"}
    assert sources.reads == ["a"]


async def test_a_slow_source_delays_only_those_who_asked_for_it(store: AdapterStore[str], sources: Sources) -> None:
    add(sources, "slow")
    add(sources, "fast")
    sources.gates["slow"] = threading.Event()
    slow = asyncio.create_task(store.register("slow", "slow"))
    await asyncio.wait_for(store.register("fast", "fast"), 5)
    assert not slow.done()
    sources.gates["slow"].set()
    await slow


async def test_memory_is_bounded_and_evicted_adapters_are_read_again(
    store: AdapterStore[str], sources: Sources
) -> None:
    refs = []
    for name in "abc":
        add(sources, name)
        refs.append((await store.register(name, name)).ref)
    assert store.cached_bytes <= 100
    assert refs[0].digest not in store.cached_digests
    await store.fetch(refs[0])
    assert sources.reads[-1] == "/canonical/a"
    assert store.cached_bytes <= 100
    assert refs[1].digest not in store.cached_digests, "the least recently used went"
    add(sources, "huge", size=101)
    with pytest.raises(AdapterTooLarge, match=r"101 bytes.*100"):
        await store.register("huge", "huge")


async def test_contents_that_changed_behind_the_name_are_refused(store: AdapterStore[str], sources: Sources) -> None:
    add(sources, "a")
    first = await store.register("a", "a")
    store.lost(first.ref.digest)
    add(sources, "a", as_name="other")
    with pytest.raises(AdapterMismatch, match="register it again"):
        await store.fetch(first.ref)
    second = await store.register("a", "a")
    assert second.ref.generation == first.ref.generation + 1
    assert second.ref.digest != first.ref.digest


async def test_equal_contents_keep_their_digest_under_any_name(store: AdapterStore[str], sources: Sources) -> None:
    add(sources, "a", as_name="same")
    add(sources, "b", as_name="same")
    one, two = await store.register("x", "a"), await store.register("y", "b")
    assert one.ref.digest == two.ref.digest
    assert len(sources.puts) == 1
    await store.unregister("x")
    assert one.ref.digest in store.cached_digests, "the other name still needs it"
    await store.unregister("y")
    assert one.ref.digest not in store.cached_digests


async def test_a_failing_adapter_is_read_once_until_its_time_has_come(tmp_path: Path, sources: Sources) -> None:
    now_s = [0.0]
    quarantine = Quarantine(lambda: now_s[0])
    store = AdapterStore(open_catalog(tmp_path), sources.read, sources.put, max_bytes=100, quarantine=quarantine)
    add(sources, "a")
    ref = (await store.register("a", "a")).ref
    store.lost(ref.digest)
    del sources.contents["/canonical/a"]
    sources.reads.clear()
    errors = await asyncio.gather(*(store.fetch(ref) for _ in range(20)), return_exceptions=True)
    assert {type(error) for error in errors} == {AdapterFormatError}
    for _ in range(20):
        with pytest.raises(AdapterQuarantined, match=r"adapter 'a' failed to load: /canonical/a is broken; .*5 s"):
            await store.fetch(ref)
    assert sources.reads == ["/canonical/a"]
    now_s[0] += FIRST_S
    with pytest.raises(AdapterFormatError):
        await store.fetch(ref)
    with pytest.raises(AdapterQuarantined, match=r"2 times in a row.*10 s"):
        await store.fetch(ref)
    assert len(sources.reads) == 2
    add(sources, "a")
    assert (await store.register("a", "a")).ref == ref
    store.lost(ref.digest)
    assert await store.fetch(ref) == f"handle-{ref.digest}", "registered again, it is tried at once"
    store.close()


async def test_names_and_failures(store: AdapterStore[str], sources: Sources) -> None:
    add(sources, "a")
    for name in ("", "../a", "a/b", "a:b", ".a", "x" * 129, "a\n", "é", "base"):
        with pytest.raises(InvalidRequest):
            await store.register(name, "a")
    with pytest.raises(AdapterFormatError):
        await store.register("a", "broken")
    with pytest.raises(NotFound):
        await store.unregister("a")
    assert store.entries() == []


async def test_the_registry_survives(tmp_path: Path, sources: Sources) -> None:
    add(sources, "a")
    for expected in (1, 1, 2):
        store = AdapterStore(open_catalog(tmp_path), sources.read, sources.put, max_bytes=100)
        if expected == 2:
            await store.unregister("a")
        entry = await store.register("a", "a")
        assert entry.ref.generation == expected, "a removed name that returns is a new generation"
        store.close()
    again = open_catalog(tmp_path)
    assert [entry.ref for entry in again.entries()] == [entry.ref]


async def test_watchers_get_news_at_once_and_the_owner_knows_when_all_have_it() -> None:
    published = Published("zero")
    version, value = await published.newer(None, "w", 1) or (None, None)
    assert value == "zero"
    waiting = asyncio.create_task(published.newer(version, "w", 5))
    await asyncio.sleep(0)
    published.publish("one")
    settled = asyncio.create_task(published.settled(5))
    news = await waiting
    assert news is not None
    assert news[1] == "one"
    await asyncio.sleep(0.02)
    assert not settled.done(), "it was sent, not yet confirmed"
    following = asyncio.create_task(published.newer(news[0], "w", 60))
    assert await settled
    following.cancel()
    published.publish("two")
    assert not await published.settled(0.05), "a living watcher that does not ask holds it up"
