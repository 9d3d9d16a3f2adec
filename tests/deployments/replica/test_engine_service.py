"""What a replica's service does when its engine does nothing any more."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing
from typing import cast

import pytest

from app.deployments.replica import engine_service as module
from app.deployments.replica.adapter_fetcher import MappedAdapters
from app.deployments.rpc import frames as frames_module
from app.deployments.rpc.frames import pack_frame
from app.deployments.rpc.transport import ReplicaGone
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.engine_thread import EngineThread
from app.engine.errors import AdapterUnreadable, EngineFailure
from app.engine.request import GenerateRequest, SamplingParams
from tests.deployments.fleet import Fleet, FleetDispatcher
from tests.fakes import fake_adapter, fake_request, fake_tokens


async def collect(dispatcher: FleetDispatcher, request: GenerateRequest) -> list[int]:
    async with aclosing(dispatcher.stream(request)) as stream:
        return [token_id async for chunk in stream for token_id in chunk.token_ids]


class TwoPlaces:
    """The same contents at two places, of which one hangs and then fails."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def fetch(self, ref: AdapterRef) -> LoraAdapter:
        if ref.uri == "theirs":
            await self.gate.wait()
            raise AdapterUnreadable(f"{ref.name} cannot be read", retry_after_s=5)
        return fake_adapter("one", 8)


async def test_a_request_waits_for_its_own_tenants_source_alone() -> None:
    places = TwoPlaces()
    adapters = MappedAdapters(places)
    digest = fake_adapter("one", 8).card.digest
    theirs = asyncio.create_task(adapters.fetch(AdapterRef("secret", digest, "other", uri="theirs")))
    await asyncio.sleep(0)
    mine = await adapters.fetch(AdapterRef("mine", digest, "me", uri="mine"))
    assert mine.card.digest == digest
    same = asyncio.create_task(adapters.fetch(AdapterRef("mine", digest, "me", uri="theirs")))
    await asyncio.sleep(0)
    places.gate.set()
    with pytest.raises(AdapterUnreadable, match="secret"):
        await theirs
    with pytest.raises(AdapterUnreadable, match="mine"):
        await same


async def test_streams_of_an_engine_whose_step_hangs_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_CHECK_INTERVAL_S", 0.01)
    fleet = Fleet(2)
    dispatcher = fleet.dispatcher()
    victim, other = fleet.replicas.values()
    victim.backend.max_steps = 5
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    requests = [fake_request(f"r{index}", [index, 2], sampling=sampling) for index in range(8)]
    watching = asyncio.create_task(victim.service.watch_steps(0.2))
    try:
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*(collect(dispatcher, request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            assert answer == [item.token_id for item in fake_tokens(request, None)]
        assert victim.submitted, "some were on the replica that hangs"
        assert victim.thread.failure is not None
        assert other.thread.failure is None
        assert not watching.done()
    finally:
        watching.cancel()
        await dispatcher.close()
        fleet.stop()


async def test_a_hung_step_that_ends_after_all_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests have their last token in it, and from another replica, which counts them."""
    monkeypatch.setattr(module, "STEP_CHECK_INTERVAL_S", 0.01)
    fleet = Fleet(2)
    dispatcher = fleet.dispatcher()
    victim, other = fleet.replicas.values()
    victim.backend.max_steps = 3
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    request = fake_request("r", [1, 2], sampling=sampling)
    fleet.off_table.add(other.replica_id)
    watching: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(120):
            answer = asyncio.create_task(collect(dispatcher, request))
            while victim.backend.num_steps < 3:
                await asyncio.sleep(0.01)
            watching = asyncio.create_task(victim.service.watch_steps(0.2))
            fleet.off_table.clear()
            assert await answer == [item.token_id for item in fake_tokens(request, None)]
            assert [each.request_id for each in other.submitted] == ["r/2"]
            victim.backend.resumed.set()
            while victim.engine.failure is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert victim.backend.num_steps == 4, "the late step has ended"
            while "r/2" not in fleet.consumed:
                await asyncio.sleep(0.01)
        assert list(fleet.consumed) == ["r/2"]
    finally:
        if watching is not None:
            watching.cancel()
        await dispatcher.close()
        fleet.stop()


class SlowToEnd:
    """An engine whose check ends a process, which takes a moment."""

    def __init__(self) -> None:
        self.is_checking, self.goes_on = threading.Event(), threading.Event()
        self.failure: EngineFailure | None = None

    def check_progress(self, max_step_s: float) -> bool:  # noqa: ARG002
        self.is_checking.set()
        assert self.goes_on.wait(20), "the event loop runs meanwhile"
        self.failure = EngineFailure("it hangs")
        return True


async def test_requests_are_served_while_a_hanging_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_CHECK_INTERVAL_S", 0.01)
    service = module.EngineService(TwoPlaces(), time.time, max_queued_requests=8)
    engine = SlowToEnd()
    service.start(cast("EngineThread", engine))
    watching = asyncio.create_task(service.watch_steps(0.2))
    async with asyncio.timeout(60):
        while not engine.is_checking.is_set():
            await asyncio.sleep(0.01)
        engine.goes_on.set()
        with pytest.raises(ReplicaGone, match="it hangs"):
            async for _ in service.frames("link"):
                pass
    watching.cancel()


async def test_a_link_through_ray_lasts_while_idle_until_the_replica_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader may be cut off, and at the end of a call Ray waits for the reader on the event loop."""
    monkeypatch.setattr(frames_module, "HEARTBEAT_S", 0.01)
    drains = False
    service = module.EngineService(
        TwoPlaces(), time.time, max_queued_requests=8, idle_s=0.05, is_draining=lambda: drains
    )
    service.start(cast("EngineThread", SlowToEnd()))
    items = service.packed_frames("link", None)
    began_s = time.monotonic()
    while time.monotonic() - began_s < 0.3:
        assert await anext(items) == pack_frame([])
    drains = True
    async with asyncio.timeout(20):
        async for item in items:
            assert item == pack_frame([])
