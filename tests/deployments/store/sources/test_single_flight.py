"""Many ask at once, for what is not here yet: one download, one read, one copy; a broken source hurts nobody else."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.deployments.replica.adapter_fetcher import MappedAdapters
from app.deployments.store.adapter_reader import AdapterReader
from app.deployments.store.sources.urls import UrlFetcher
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.adapter_tokenizer import TEXT_FILES
from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.sandbox.packing import unpack_adapter
from app.engine.errors import AdapterQuarantined, NotFound, SourceError
from tests.deployments.fleet import Fleet
from tests.deployments.ingress.dispatch.test_dispatcher import collect, make_request
from tests.deployments.store.sources.conftest import OpenLibrary, Store
from tests.deployments.store.sources.servers import FileServer
from tests.fakes import FAKE_BASE

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def library(open_library: OpenLibrary, server: FileServer) -> AdapterReader:
    return open_library(UrlFetcher([f"{server.url}/"], options={}, max_bytes=1 << 20, timeout_s=600))


async def until(condition: object) -> None:
    async with asyncio.timeout(600):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.002)


async def test_two_hundred_first_requests_over_two_ingresses_are_one_fetch(
    store: Store, server: FileServer, files: dict[str, bytes], card: AdapterCard
) -> None:
    server.files |= {f"/a/{name}": contents for name, contents in files.items()}
    gate = server.gates[f"/a/{WEIGHTS}"] = threading.Event()
    ref = AdapterRef("a", card.digest, "t", uri=f"{server.url}/a")
    fleet = Fleet(2)
    served: list[LoraAdapter] = []

    async def fetch(asked: AdapterRef) -> LoraAdapter:
        adapter = unpack_adapter(*await store.fetch(asked))
        served.append(replace(adapter, card=replace(adapter.card, base_digest=FAKE_BASE)))
        return served[-1]

    for replica in fleet.replicas.values():
        replica.service.adapters = MappedAdapters(SimpleNamespace(fetch=fetch))
    ingresses = [fleet.dispatcher(), fleet.dispatcher()]
    requests = [replace(make_request(f"r{i}", [i % 61, 5, 7], max_tokens=4), adapter=ref) for i in range(200)]
    answers = [asyncio.create_task(collect(ingresses[index % 2], request)) for index, request in enumerate(requests)]
    base = asyncio.create_task(collect(ingresses[0], make_request("base", [1, 2, 3], max_tokens=4)))
    await until(lambda: sum(replica.service.num_waiting_for_adapters for replica in fleet.replicas.values()) == 200)
    assert (await base)[1].finish_reason is not None, "base traffic does not wait for adapters"
    assert not any(answer.done() for answer in answers)
    gate.set()
    for _, last in await asyncio.gather(*answers):
        assert last.finish_reason in ("length", "stop")
        assert last.error is None
    assert server.gets == {f"/a/{name}": 1 for name in {*files, *TEXT_FILES}}
    assert store.counts.of("source")["loads"] == 1
    assert store.counts.of("host")["held_adapters"] == 1
    for ingress in ingresses:
        await ingress.close()
    fleet.stop()


async def test_a_broken_source_is_asked_once_and_hurts_no_other(
    store: Store, server: FileServer, files: dict[str, bytes], card: AdapterCard
) -> None:
    server.files |= {f"/a/{name}": contents for name, contents in files.items()}
    good = (await store.register("good", f"{server.url}/a")).ref
    broken = AdapterRef("broken", "0" * 64, "t", uri=f"{server.url}/none")
    asked: list[str] = []
    answer = server.answer

    def failing(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        asked.append(path)
        return (500, {}, b"") if path.startswith("/none") else answer(method, path)

    server.answer = failing
    errors = await asyncio.gather(*(store.fetch(broken) for _ in range(50)), return_exceptions=True)
    assert {type(error) for error in errors} == {SourceError}
    with pytest.raises(AdapterQuarantined, match="500"):
        await store.fetch(broken)
    assert len(asked) == 1
    store.invalidate(good.digest)
    assert (await store.fetch(good)).card == replace(card, metadata=""), "from disk"
    assert len(asked) == 1


async def test_every_tier_counts_what_it_did(
    tmp_path: Path, store: Store, server: FileServer, files: dict[str, bytes]
) -> None:
    server.files |= {f"/a/{name}": contents for name, contents in files.items()}
    remote = (await store.register("remote", f"{server.url}/a")).ref
    local = (await store.register("local", str(tmp_path / "original"))).ref
    assert local.digest == remote.digest, "equal contents, wherever they come from"
    await store.fetch(remote)
    store.invalidate(remote.digest)
    await store.fetch(remote)
    store.invalidate(remote.digest)
    await store.fetch(local)
    counts = {tier: store.counts.of(tier) for tier in ("host", "disk", "source")}  # type: ignore[arg-type]
    assert (counts["host"]["hits"], counts["host"]["misses"]) == (1, 2)
    assert counts["disk"]["hits"] == 1
    assert counts["source"]["loads"] == 3
    assert counts["host"]["held_adapters"] == counts["disk"]["held_adapters"] == 1
    assert counts["disk"]["held_bytes"] == sum(map(len, files.values())) <= counts["disk"]["limit_bytes"]
    assert counts["host"]["limit_bytes"] > 0
    assert counts["source"]["load_s"] > 0
    with pytest.raises(NotFound):
        await store.register("x", f"{server.url}/nothing")
