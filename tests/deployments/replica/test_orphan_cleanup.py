"""A replica frees what the registry no longer has, and nothing that it may have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing

import pytest
import pytest_asyncio

from app.deployments.replica import orphan_cleanup as module
from app.deployments.replica.orphan_cleanup import OrphanedAdapters
from app.engine.adapters.card import AdapterRef
from app.engine.errors import EngineFailure, NotReady
from app.engine.request import SamplingParams
from tests.deployments.fleet import FakeReplica, Fleet
from tests.fakes import fake_adapter, fake_request

ADAPTERS = {name: fake_adapter(name, 8) for name in ("kept", "gone", "busy")}
DIGESTS = {name: adapter.card.digest for name, adapter in ADAPTERS.items()}


class Registry:
    """Knows these contents to be gone, or raises."""

    def __init__(self, *names: str) -> None:
        self.names: Collection[str] = names
        self.errors: list[Exception] = []
        self.asked: list[Collection[str]] = []

    async def unreferenced_digests(self, digests: Collection[str]) -> list[str]:
        self.asked.append(digests)
        if self.errors:
            raise self.errors.pop()
        return [DIGESTS[name] for name in self.names if DIGESTS[name] in digests]


class Bench:
    """A replica that holds these adapters on its device, and has one of them mapped only."""

    def __init__(self) -> None:
        self.fleet = Fleet(1)
        (self.replica,) = self.fleet.replicas.values()
        self.registry = Registry()
        self.leftovers = OrphanedAdapters(self.replica.service, self.registry)

    async def hold(self, *names: str) -> FakeReplica:
        for name in names:
            ref = AdapterRef(name, DIGESTS[name], "t")
            written_bytes = await asyncio.wrap_future(self.replica.thread.load_adapter(ADAPTERS[name], ref))
            self.replica.service.on_prefetched(ADAPTERS[name], ref, written_bytes)
        return self.replica

    def held(self) -> set[str]:
        return {name for name, digest in DIGESTS.items() if digest in self.replica.service.cached_digests()}


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.leftovers.close()
    bench.fleet.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.002)


async def test_what_the_registry_no_longer_has_is_freed(bench: Bench) -> None:
    await bench.hold("kept", "gone")
    num_free = bench.replica.thread.stats().num_rank_rows_free
    bench.registry.names = ("gone",)
    await bench.leftovers.check()
    await until(lambda: bench.held() == {"kept"})
    assert bench.replica.thread.stats().num_rank_rows_free == num_free + 8
    await bench.leftovers.check()
    assert bench.registry.asked[-1] == [DIGESTS["kept"]]


async def test_a_replica_that_holds_nothing_asks_nobody(bench: Bench) -> None:
    await bench.leftovers.check()
    assert bench.registry.asked == []


async def test_sequences_that_run_end_first(bench: Bench) -> None:
    replica = bench.replica
    bench.fleet.adapters[DIGESTS["busy"]] = ADAPTERS["busy"]
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    replica.backend.max_steps = 3
    bench.registry.names = ("busy",)
    async with aclosing(replica.service.frames("link")) as frames:
        await anext(frames)
        replica.service.submit("link", [fake_request("r", [1, 2], adapter=ADAPTERS["busy"], sampling=sampling)])
        await until(lambda: replica.backend.num_steps == 3)
        await bench.leftovers.check()
        await bench.leftovers.check()
        assert len(bench.registry.asked) == 1, "what is being freed is not asked for again"
        assert {item.digest for item in replica.thread.stats().residents} == {DIGESTS["busy"]}
        replica.backend.max_steps = None
        replica.backend.resumed.set()
        num_tokens = 0
        async for frame in frames:
            num_tokens += sum(len(chunk.token_ids) for chunk in frame)
            if any(chunk.finish_reason is not None for chunk in frame):
                break
    assert num_tokens == 6
    await until(lambda: bench.held() == set())


async def test_a_registry_in_trouble_frees_nothing_and_is_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.005)
    await bench.hold("kept", "gone")
    bench.registry.errors = [NotReady("it restarts"), AttributeError("no 'gone'"), NotReady("it restarts")]
    looking = asyncio.create_task(bench.leftovers.run())
    await until(lambda: len(bench.registry.asked) > 3)
    assert bench.held() == {"kept", "gone"}
    bench.registry.names = ("gone",)
    await until(lambda: bench.held() == {"kept"})
    assert not looking.done()
    looking.cancel()
    assert sum("asking the registry" in record.message for record in caplog.records) == 2


async def test_an_engine_that_fails_takes_its_rows_along(bench: Bench) -> None:
    await bench.hold("gone")
    bench.registry.names = ("gone",)
    replica = bench.replica

    def unload_adapter(digest: str) -> None:
        raise EngineFailure(f"it computes nothing more: {digest[:4]}")

    replica.service.unload_adapter = unload_adapter  # type: ignore[method-assign, assignment]
    await bench.leftovers.check()
    await until(lambda: not bench.leftovers._dropping)
    assert bench.held() == {"gone"}
