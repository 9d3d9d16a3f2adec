"""Pinned adapters come to the device by themselves, one that cannot be had delays no other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from app.deployments.registry.models import CatalogEntry
from app.deployments.registry.pins import Pins
from app.deployments.replica.engine_service import EngineService
from app.deployments.replica.pin_controller import PinController
from app.deployments.rpc.long_poll_client import LongPollValue
from app.deployments.rpc.long_poll_host import Version
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.engine_thread import EngineThread
from app.engine.errors import SourceError
from tests.fakes import FakeBackend, fake_adapter

ADAPTERS = {name: fake_adapter(name, 8) for name in ("a", "b", "slow", "broken")}


def pinned(*names: str) -> Pins:
    refs = [AdapterRef(name, ADAPTERS[name].card.digest, "t") for name in names]
    return Pins(tuple(CatalogEntry(ref, 8, 64, 0.0, "ada", pinned=True) for ref in refs))


class Bench:
    """A keeper over an engine that runs."""

    def __init__(self) -> None:
        limits = BackendLimits(num_kv_blocks=32, block_size=8, lora_pool_rows=32, rank_alignment=8, max_loras=8)
        self.thread = EngineThread(Engine(FakeBackend(limits), EngineConfig()), lambda _: None)
        self.thread.start()
        self.gate = asyncio.Event()
        self.fetches: list[str] = []
        self.broken: dict[str, str] = {"broken": "no such bucket"}
        self.service = EngineService(self, time.time, max_queued_requests=512)
        self.keeper = PinController(self.thread, self, self.service)

    @property
    def brought(self) -> list[str]:
        """What a request for it would find in this process."""
        return list(self.service.adapters.digests)

    async def fetch(self, ref: AdapterRef) -> LoraAdapter:
        self.fetches.append(ref.name)
        if ref.name == "slow":
            await self.gate.wait()
        if ref.name in self.broken:
            raise SourceError(self.broken[ref.name])
        return ADAPTERS[ref.name]

    def residents(self) -> set[str]:
        digests = {item.digest for item in self.thread.stats().residents}
        return {name for name, adapter in ADAPTERS.items() if adapter.card.digest in digests}


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.keeper.close()
    assert bench.thread.stop(60)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.002)


async def test_what_is_pinned_comes_and_the_rest_waits_for_nobody(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            bench.keeper.pin(pinned("slow", "broken", "a", "b"))
            await until(lambda: bench.residents() == {"a", "b"} and set(bench.keeper._loading) == {digest("slow")})
    assert bench.fetches.count("slow") == 1, "it is on its way"
    assert bench.fetches.count("broken") == 3
    (record,) = caplog.records
    assert record.message == "pinned adapter broken is not on the device: no such bucket"
    bench.broken.clear()
    bench.keeper.pin(pinned("slow", "broken", "a", "b"))
    bench.gate.set()
    await until(lambda: len(bench.brought) == 4)
    assert bench.residents() == set(ADAPTERS)


async def test_what_is_unpinned_while_it_is_fetched_does_not_come(bench: Bench) -> None:
    bench.keeper.pin(pinned("slow", "a"))
    await until(lambda: bench.residents() == {"a"} and "slow" in bench.fetches)
    bench.keeper.pin(pinned("a"))
    bench.gate.set()
    await until(lambda: not bench.keeper._loading)
    assert bench.residents() == {"a"}
    assert bench.brought == [digest("a")]


def digest(name: str) -> str:
    return ADAPTERS[name].card.digest


async def test_pins_are_followed_and_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.deployments.replica.pin_controller.RETRY_S", 0.01)

    async def no_news(*_: object) -> None:
        raise AssertionError("the test tells it")

    watched = LongPollValue(no_news, "replica", Pins())
    following = asyncio.create_task(bench.keeper.follow(watched))
    watched.apply(Version("life", 1), pinned("a", "broken"))
    await until(lambda: bench.residents() == {"a"} and bench.fetches.count("broken") > 2)
    assert bench.service.changed.is_set(), "placement is to hear where it is"
    watched.apply(Version("life", 2), pinned("b"))
    await until(lambda: bench.residents() >= {"b"} and bench.keeper._pinned == {digest("b")})
    assert not following.done()
    following.cancel()
