"""Streams over a fleet: whole, in order, each token once, whatever happens to replicas and callers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

import pytest
import pytest_asyncio

from app.config import PlacementConfig
from app.deployments.ingress.dispatch.dispatcher import (
    MAX_HELD_BACK,
    MAX_REFUSALS,
    Dispatcher,
    PoisonRequests,
    RecentRefusals,
)
from app.deployments.ingress.dispatch.stream import MAX_LOSSES, Loss, Stream
from app.deployments.placement.replica_choice import make_policy
from app.deployments.rpc.transport import EngineFailed, Frame, ReplicaUnreachable
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.errors import (
    AdapterQuarantined,
    AdapterWriteFailed,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    NotReady,
    PoisonRequest,
    QueueFull,
)
from app.engine.request import GenerateRequest, RequestUsage, SamplingParams, TokenChunk
from tests.deployments.fleet import FakeReplica, Fleet
from tests.fakes import fake_adapter, fake_request, fake_tokens

MakeFleet = Callable[..., Fleet]


@pytest_asyncio.fixture
async def make_fleet() -> AsyncIterator[MakeFleet]:
    fleets: list[Fleet] = []

    def make(*args: int, **options: float) -> Fleet:
        fleets.append(Fleet(*args, **options))  # type: ignore[arg-type]
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.stop()


def make_request(
    request_id: str,
    token_ids: list[int],
    adapter: LoraAdapter | None = None,
    *,
    max_tokens: int = 16,
    ignore_eos: bool = False,
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
    return fake_request(request_id, token_ids, adapter, sampling=sampling)


def expected(request: GenerateRequest, adapter: LoraAdapter | None = None) -> list[int]:
    return [item.token_id for item in fake_tokens(request, adapter)]


async def collect(
    dispatcher: Dispatcher, request: GenerateRequest, tokens: list[int] | None = None
) -> tuple[list[int], TokenChunk]:
    """The whole answer; what has arrived so far can be watched in `tokens`."""
    tokens = [] if tokens is None else tokens
    async with aclosing(dispatcher.stream(request)) as stream:
        async for chunk in stream:
            tokens += chunk.token_ids
            last = chunk
    return tokens, last


def random_requests(
    fleet: Fleet, count: int, rng: random.Random, *, max_tokens: int = 40
) -> list[tuple[GenerateRequest, LoraAdapter | None]]:
    adapters = [None, *(fake_adapter(f"a{i}", rng.choice([1, 8, 16])) for i in range(4))]
    fleet.adapters |= {adapter.card.digest: adapter for adapter in adapters if adapter is not None}
    result = []
    for i in range(count):
        adapter = rng.choice(adapters)
        prompt = [rng.randrange(61) for _ in range(rng.randint(1, 30))]
        result.append((make_request(f"r{i}", prompt, adapter, max_tokens=max_tokens, ignore_eos=True), adapter))
    return result


async def test_many_streams_over_two_replicas_each_get_their_own_tokens(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    dispatcher = fleet.dispatcher()
    pairs = random_requests(fleet, 60, random.Random(1))
    results = await asyncio.gather(*(collect(dispatcher, request) for request, _ in pairs))
    for (request, adapter), (tokens, last) in zip(pairs, results, strict=True):
        assert tokens == expected(request, adapter)
        assert last.finish_reason == "length"
        assert last.usage is not None
        assert last.usage.completion_tokens == 40
    assert all(replica.submitted for replica in fleet.replicas.values())
    assert dispatcher.connections.num_streams == 0
    await dispatcher.close()


async def test_requests_placed_together_are_one_call_per_replica(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    dispatcher = fleet.dispatcher()
    streams = [Stream(make_request(f"r{i}", [1, 2, 3], max_tokens=3)) for i in range(10)]
    dispatcher.router.assign(streams)
    await until(lambda: all(replica.calls for replica in fleet.replicas.values()))
    assert [replica.calls for replica in fleet.replicas.values()] == [[5], [5]]
    await dispatcher.close()


async def test_an_adapter_keeps_going_to_one_replica(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(3)
    dispatcher = fleet.dispatcher()
    adapter = fake_adapter("a", 8)
    fleet.adapters[adapter.card.digest] = adapter
    requests = [make_request(f"r{i}", [i, 2, 3], adapter, max_tokens=4) for i in range(12)]
    await asyncio.gather(*(collect(dispatcher, request) for request in requests))
    assert sorted(len(replica.submitted) for replica in fleet.replicas.values()) == [0, 0, 12]
    assert fleet.fetches == [adapter.card.digest], "twelve first requests fetch once"
    await dispatcher.close()


@pytest.mark.parametrize(("policy", "num_questions"), [("sticky", 1), ("least_loaded", 0)])
async def test_placement_is_asked_once_for_an_adapter_and_never_where_it_has_no_say(
    make_fleet: MakeFleet,
    monkeypatch: pytest.MonkeyPatch,
    policy: Literal["sticky", "least_loaded"],
    num_questions: int,
) -> None:
    fleet = make_fleet(2)
    fleet.policy = make_policy(PlacementConfig(policy=policy))
    dispatcher = fleet.dispatcher()
    adapter = fake_adapter("a", 8)
    fleet.adapters[adapter.card.digest] = adapter
    questions, assign = [], fleet.assign

    async def assign_and_note(digests: Sequence[str]) -> None:
        questions.append(digests)
        await assign(digests)

    monkeypatch.setattr(fleet, "assign", assign_and_note)
    for index in range(4):
        request = make_request(f"r{index}", [index], adapter, max_tokens=3, ignore_eos=True)
        assert (await collect(dispatcher, request))[0] == expected(request, adapter)
    assert questions == [[adapter.card.digest]] * num_questions
    await dispatcher.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", ["killed", "failed", "stopped"])
async def test_a_lost_replica_changes_no_token(make_fleet: MakeFleet, loss: str, seed: int) -> None:
    """Its process died, its engine failed in a step, or it was stopped before its streams had ended."""
    rng = random.Random(seed)
    fleet = make_fleet(2)
    dispatcher = fleet.dispatcher()
    owed = counted_by(dispatcher)
    pairs = random_requests(fleet, 24, rng, max_tokens=60)
    victim, other = fleet.replicas.values()
    victim.backend.max_steps = other.backend.max_steps = 20
    arrived: dict[str, list[int]] = {request.request_id: [] for request, _ in pairs}
    tasks = [asyncio.ensure_future(collect(dispatcher, request, arrived[request.request_id])) for request, _ in pairs]
    await until(lambda: victim.backend.num_steps == other.backend.num_steps == 20)
    await until(lambda: any(arrived[request.request_id.split("/")[0]] for request in victim.submitted))
    num_before = len(other.submitted)
    if loss == "killed":
        fleet.kill(victim.replica_id)
    elif loss == "failed":
        victim.backend.fail_at = 0
    else:
        stopped = asyncio.ensure_future(asyncio.to_thread(victim.thread.stop, 120.0))
        await until(lambda: victim.thread._stopping)
    if loss != "killed":
        victim.backend.resumed.set()
    other.backend.resumed.set()
    results = await asyncio.gather(*tasks)
    assert loss != "stopped" or await stopped
    for (request, adapter), (tokens, last) in zip(pairs, results, strict=True):
        assert tokens == expected(request, adapter)
        assert last.finish_reason == "length"
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(request.token_ids), 60)
        consumed = total([consumed_by(fleet, request), *(usage for each, usage in owed if each is request)])
        counted = (consumed.prompt_tokens, consumed.completion_tokens)
        assert counted == (len(request.token_ids), 60), "once, wherever it was computed"
    moved = other.submitted[num_before:]
    assert any(request.resume_token_ids for request in moved), "some stream was cut in its middle"
    if loss == "killed":
        assert fleet.unreached_ids == {victim.replica_id}
        assert set(fleet.view.replicas) == set(fleet.replicas), "others may still use it"
    else:
        assert set(fleet.view.replicas) == {other.replica_id}, "by its own word"
    await dispatcher.close()


def consumed_by(fleet: Fleet, request: GenerateRequest) -> RequestUsage:
    """What replicas that live have counted of all attempts at a request."""
    return total([each for attempt, each in fleet.consumed.items() if attempt.startswith(f"{request.request_id}/")])


def total(usages: Sequence[RequestUsage]) -> RequestUsage:
    return RequestUsage(*map(sum, zip(*usages, strict=True))) if usages else RequestUsage()


def counted_by(dispatcher: Dispatcher) -> list[tuple[GenerateRequest, RequestUsage]]:
    """What the dispatcher counts from now on, because replicas cannot."""
    counted: list[tuple[GenerateRequest, RequestUsage]] = []
    dispatcher._count = lambda *what: counted.append(what)
    return counted


async def test_a_stream_that_leaves_a_replica_alive_is_counted_by_both_and_once(make_fleet: MakeFleet) -> None:
    """The link is lost, say, and the replica finds out later."""
    fleet = make_fleet(1)
    (replica,) = fleet.replicas.values()
    dispatcher, request = fleet.dispatcher(), make_request("r", [1, 2, 3], max_tokens=60, ignore_eos=True)
    replica.backend.max_steps = 20
    arrived: list[int] = []
    task = asyncio.ensure_future(collect(dispatcher, request, arrived))
    await until(lambda: len(arrived) == 20)
    dispatcher.connections._drop(dispatcher.connections._connections[replica.replica_id], Loss.LINK_ENDED)
    replica.backend.max_steps = None
    replica.backend.resumed.set()
    tokens, _ = await task
    assert tokens == expected(request)
    await until(lambda: len(fleet.consumed) == 2)
    stats = replica.thread.stats()
    assert fleet.consumed["r/2"].prompt_tokens == 0
    assert consumed_by(fleet, request)[:3] == (3, 0, stats.num_tokens_generated)
    assert stats.num_prompt_tokens == 3, "the second time it is not billed"
    await dispatcher.close()


async def test_a_replica_whose_link_is_lost_is_told_to_end_what_goes_on_elsewhere(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own end of the link hears nothing of the loss."""
    fleet = make_fleet(1)
    (replica,) = fleet.replicas.values()
    dispatcher, request = fleet.dispatcher(), make_request("r", [1, 2, 3], max_tokens=60, ignore_eos=True)
    replica.backend.max_steps = 20
    frames, lost = fleet.frames, asyncio.Event()
    links: list[AsyncIterator[Frame]] = []

    async def until_lost(replica_id: str, link_id: str) -> AsyncIterator[Frame]:
        links.append(frames(replica_id, link_id))
        async for frame in links[-1]:
            yield frame
            if len(arrived) == 20 and not lost.is_set():
                lost.set()
                raise ReplicaUnreachable("the connection was reset")

    monkeypatch.setattr(fleet, "frames", until_lost)
    arrived: list[int] = []
    task = asyncio.ensure_future(collect(dispatcher, request, arrived))
    await until(lambda: len(arrived) == 20)
    await until(lambda: bool(replica.aborted))
    replica.backend.resumed.set()
    tokens, _ = await task
    assert tokens == expected(request)
    await until(lambda: len(fleet.consumed) == 2)
    assert fleet.consumed["r/1"].completion_tokens < 60
    await dispatcher.close()


async def test_what_a_dead_replica_has_computed_is_counted_though_nobody_goes_on(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1)
    (replica,) = fleet.replicas.values()
    dispatcher, request = fleet.dispatcher(replica_timeout_s=0.1), make_request("r", [1, 2, 3], ignore_eos=True)
    counted = counted_by(dispatcher)
    replica.backend.max_steps = 5
    arrived: list[int] = []
    task = asyncio.ensure_future(collect(dispatcher, request, arrived))
    await until(lambda: len(arrived) == 5)
    fleet.kill(replica.replica_id)
    with pytest.raises(NotReady):
        await task
    assert counted == [(request, RequestUsage(3, 0, 5))]
    await dispatcher.close()


async def test_what_a_dead_replica_has_computed_is_counted_though_its_client_read_slowly_and_left(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(1)
    (replica,) = fleet.replicas.values()
    dispatcher, request = fleet.dispatcher(), make_request("r", [1, 2, 3], ignore_eos=True)
    counted = counted_by(dispatcher)
    replica.backend.max_steps = 5
    async with aclosing(dispatcher.stream(request)) as stream:
        num_read = len((await anext(stream)).token_ids)
        (connection,) = dispatcher.connections._connections.values()
        (running,) = connection.streams.values()
        await until(lambda: num_read + sum(map(_num_tokens, running.inbox._items)) == 5)
        fleet.kill(replica.replica_id)
        await until(lambda: running.connection is None)
    assert counted == [(request, RequestUsage(3, 0, 5))]
    await dispatcher.close()


@pytest.mark.parametrize("ends", ["its client leaves", "an error"])
async def test_what_a_dead_replica_has_computed_is_counted_once_however_the_next_one_ends(
    make_fleet: MakeFleet, ends: str
) -> None:
    """The next one has not computed anything yet: it fetches the adapter, or cannot write it to the device."""
    fleet, adapter = make_fleet(2), fake_adapter("a", 8)
    fleet.adapters[adapter.card.digest] = adapter
    dispatcher, request = fleet.dispatcher(), make_request("r", [1, 2, 3], adapter, max_tokens=60, ignore_eos=True)
    counted = counted_by(dispatcher)
    for replica in fleet.replicas.values():
        replica.backend.max_steps = 5
    arrived: list[int] = []
    task = asyncio.ensure_future(collect(dispatcher, request, arrived))
    await until(lambda: len(arrived) == 5)
    first, other = sorted(fleet.replicas.values(), key=lambda replica: not replica.submitted)
    if ends == "an error":
        other.backend.write_error = AdapterWriteFailed("the device is full")
        fleet.kill(first.replica_id)
        assert isinstance((await task)[1].error, AdapterWriteFailed)
    else:
        fleet.fetch_gate.clear()
        fleet.kill(first.replica_id)
        await until(lambda: other.service.num_waiting_for_adapters == 1)
        task.cancel()
        await until(lambda: bool(other.aborted))
        await asyncio.gather(task, return_exceptions=True)
    assert counted == [(request, RequestUsage(3, 0, 5))]
    await until(lambda: ends != "an error" or bool(fleet.consumed))
    assert consumed_by(fleet, request)[:3] == (0, 0, 0)
    await dispatcher.close()


def _num_tokens(item: object) -> int:
    return len(item.token_ids) if isinstance(item, TokenChunk) else 0


async def test_a_draining_replica_finishes_its_streams_and_gets_no_new_ones(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, idle_s=0.05)
    dispatcher = fleet.dispatcher()
    first, second = fleet.replicas.values()
    running = make_request("long", [1, 2], max_tokens=200, ignore_eos=True)
    task = asyncio.ensure_future(collect(dispatcher, running))
    while not (first.submitted or second.submitted):
        await asyncio.sleep(0.001)
    drained, other = (first, second) if first.submitted else (second, first)
    drained.draining = True
    results = await asyncio.gather(
        *(collect(dispatcher, make_request(f"r{i}", [i], max_tokens=5, ignore_eos=True)) for i in range(8))
    )
    assert [tokens for tokens, _ in results] == [
        expected(make_request(f"r{i}", [i], max_tokens=5, ignore_eos=True)) for i in range(8)
    ]
    assert (await task)[0] == expected(running)
    assert [request.request_id for request in drained.submitted] == ["long/1"], "not moved while it drains"
    assert len(other.submitted) == 8
    await until(lambda: drained.service.num_links == 0)  # an idle reader leaves, so that Serve sees it drained
    await dispatcher.close()


async def test_a_caller_that_leaves_a_draining_replica_ends_its_request_there(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1)
    dispatcher = fleet.dispatcher()
    (replica,) = fleet.replicas.values()
    replica.backend.max_steps = 6
    async with aclosing(dispatcher.stream(make_request("r", [1] * 20, max_tokens=400, ignore_eos=True))) as stream:
        await anext(stream)
        replica.draining = True
    await until(lambda: replica.aborted == ["r/1"])
    replica.backend.resumed.set()
    await until(lambda: not replica.engine.has_work)
    assert replica.thread.stats().num_aborted == 1
    await dispatcher.close()


async def test_a_draining_replica_that_is_on_the_table_gets_no_requests(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    dispatcher = fleet.dispatcher()
    first, second = fleet.replicas.values()
    first.draining = True  # and no link of ours leads there
    requests = [make_request(f"r{i}", [i], max_tokens=5, ignore_eos=True) for i in range(4)]
    results = await asyncio.gather(*(collect(dispatcher, request) for request in requests))
    assert [tokens for tokens, _ in results] == [expected(request) for request in requests]
    await until(lambda: fleet.unreached_ids == {first.replica_id})
    assert len(second.submitted) == 4
    await dispatcher.close()


async def test_a_caller_that_leaves_frees_its_blocks(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1)
    dispatcher = fleet.dispatcher()
    adapter = fake_adapter("a", 8)
    fleet.adapters[adapter.card.digest] = adapter
    (replica,) = fleet.replicas.values()
    replica.backend.max_steps = 10
    async with aclosing(dispatcher.stream(make_request("r", [1] * 20, adapter, max_tokens=400))) as stream:
        await anext(stream)
        assert replica.thread.stats().num_running == 1
    await until(lambda: replica.aborted == ["r/1"])
    replica.backend.resumed.set()
    await until(lambda: replica.thread.stats().num_running == 0)
    stats = replica.thread.stats()
    assert stats.num_blocks_free == stats.num_blocks
    assert stats.num_aborted == 1
    assert dispatcher.connections.num_streams == 0
    await dispatcher.close()


async def test_callers_that_leave_at_any_moment_leave_nothing_behind(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    fleet.fetch_delay_s = 0.01
    dispatcher = fleet.dispatcher()
    rng = random.Random(5)
    pairs = random_requests(fleet, 40, rng, max_tokens=100)
    tasks = [asyncio.ensure_future(collect(dispatcher, request)) for request, _ in pairs]
    for task in tasks:
        await asyncio.sleep(rng.random() * 0.002)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for replica in fleet.replicas.values():
        await until(lambda replica=replica: not replica.engine.has_work)
        await until(lambda replica=replica: replica.service.num_waiting_for_adapters == 0)
        stats = replica.thread.stats()
        assert stats.num_blocks_free == stats.num_blocks
    assert dispatcher.connections.num_streams == 0
    assert dispatcher.connections.loads.own == {}
    await dispatcher.close()


async def test_a_cold_adapter_delays_only_its_own_requests(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1)
    fleet.fetch_gate.clear()
    dispatcher = fleet.dispatcher()
    adapter = fake_adapter("cold", 8)
    fleet.adapters[adapter.card.digest] = adapter
    cold = asyncio.ensure_future(collect(dispatcher, make_request("cold", [1], adapter, max_tokens=3)))
    await until(lambda: fleet.fetches == [adapter.card.digest])
    base = make_request("base", [1], max_tokens=30, ignore_eos=True)
    assert (await collect(dispatcher, base))[0] == expected(base)
    assert not cold.done()
    fleet.fetch_gate.set()
    assert (await cold)[0] == expected(make_request("cold", [1], adapter, max_tokens=3), adapter)
    await dispatcher.close()


async def test_those_that_wait_for_an_adapter_count_as_waiting(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1, max_queued_requests=10)
    fleet.fetch_gate.clear()
    dispatcher = fleet.dispatcher()
    adapter = fake_adapter("cold", 8)
    fleet.adapters[adapter.card.digest] = adapter
    (replica,) = fleet.replicas.values()
    requests = [make_request(f"cold{i}", [1, i], adapter, max_tokens=3, ignore_eos=True) for i in range(30)]
    cold = [asyncio.ensure_future(collect(dispatcher, request)) for request in requests]
    await until(lambda: sum(task.done() for task in cold) == 20)
    refused = [task.exception() for task in cold if task.done()]
    assert all(isinstance(error, QueueFull) for error in refused)
    assert "engine.max_queued_requests is 10, which is reached; 10 are in use by this project" in str(refused[0])
    assert replica.service.num_waiting_for_adapters == 10
    base = make_request("base", [1], max_tokens=30, ignore_eos=True)
    assert (await collect(dispatcher, base))[0] == expected(base), "they do not keep out who needs no adapter"
    fleet.fetch_gate.set()
    for request, task in zip(requests, cold, strict=True):
        if not task.done():
            assert (await task)[0] == expected(request, adapter)
    await dispatcher.close()


async def test_begun_streams_that_wait_for_an_adapter_never_give_way(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1, max_queued_requests=2)
    fleet.fetch_gate.clear()
    dispatcher = fleet.dispatcher()
    adapter = fake_adapter("cold", 8)
    fleet.adapters[adapter.card.digest] = adapter
    (replica,) = fleet.replicas.values()
    new = [make_request(f"new{i}", [1, i], adapter, max_tokens=3, ignore_eos=True) for i in range(2)]
    begun = [replace(each, request_id=f"begun {each.request_id}") for each in new]
    begun = [replace(each, resume_token_ids=tuple(expected(each, adapter)[:2])) for each in begun]
    small = replace(new[0], request_id="small", tenant_id="none waits")
    tasks = []
    for index, request in enumerate((*new, *begun, small), 1):
        tasks.append(asyncio.ensure_future(collect(dispatcher, request)))
        await until(lambda index=index: len(replica.submitted) == index)
    with pytest.raises(QueueFull):
        await tasks[1]
    fleet.fetch_gate.set()
    answers = [tokens for tokens, _ in await asyncio.gather(tasks[0], *tasks[2:])]
    assert answers == [expected(new[0], adapter), *(expected(each, adapter)[2:] for each in new), answers[0]]
    await dispatcher.close()


async def test_errors_are_the_request_s_own(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1, max_queued_requests=3)
    dispatcher = fleet.dispatcher()
    missing = fake_adapter("missing", 8)
    good = make_request("good", [1], max_tokens=5, ignore_eos=True)
    cases = [good, make_request("bad", [99999], max_tokens=5), make_request("gone", [1], missing, max_tokens=5)]
    results = await asyncio.gather(*(collect(dispatcher, request) for request in cases))
    assert results[0][0] == expected(good)
    assert isinstance(results[1][1].error, InvalidRequest)
    assert isinstance(results[2][1].error, EngineFailure), "an unexpected failure is typed on its way out"
    assert "KeyError" not in str(results[2][1].error)
    assert missing.card.digest not in str(results[2][1].error)
    many = [make_request(f"q{i}", [1], max_tokens=50, ignore_eos=True) for i in range(100)]
    (replica,) = fleet.replicas.values()
    replica.backend.max_steps = replica.backend.num_steps
    tasks = [asyncio.ensure_future(collect(dispatcher, request)) for request in many]
    await until(lambda: len(replica.submitted) >= 100)
    replica.backend.resumed.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert 0 < len(errors) < 100
    assert all(isinstance(error, QueueFull) for error in errors)
    await dispatcher.close()


async def test_what_a_full_replica_refuses_goes_where_there_is_room(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(3)
    dispatcher = fleet.dispatcher()
    adapter = fake_adapter("a", 8)
    fleet.adapters[adapter.card.digest] = adapter
    await fleet.assign([adapter.card.digest])
    (home,) = fleet.assigned_replicas(adapter.card.digest)
    fleet.replicas[home].engine._waiting.max_total = 0
    requests = [make_request(f"r{i}", [i], adapter, max_tokens=4, ignore_eos=True) for i in range(12)]
    for request, (tokens, last) in zip(
        requests, await asyncio.gather(*(collect(dispatcher, request) for request in requests)), strict=True
    ):
        assert last.error is None
        assert tokens == expected(request, adapter)
    assert len(fleet.replicas[home].submitted) == 12, "it is asked first"
    others = [len(replica.submitted) for replica in fleet.replicas.values() if replica.replica_id != home]
    assert sorted(others) == [0, 12], "an adapter has one place to go on to, too"
    base = [make_request(f"base{i}", [i], max_tokens=4, ignore_eos=True) for i in range(6)]
    for request, (tokens, _) in zip(
        base, await asyncio.gather(*(collect(dispatcher, request) for request in base)), strict=True
    ):
        assert tokens == expected(request)
    assert dispatcher.connections.loads.own == {}
    await dispatcher.close()


async def test_a_request_is_refused_when_every_replica_has_refused_it_once(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(3)
    dispatcher = fleet.dispatcher()
    adapter = fake_adapter("a", 8)
    fleet.adapters[adapter.card.digest] = adapter
    for replica in fleet.replicas.values():
        replica.engine._waiting.max_total = 0
    for request in (make_request("r", [1], adapter), make_request("base", [1])):
        with pytest.raises(QueueFull, match=r"engine\.max_queued_requests is 0"):
            await collect(dispatcher, request)
    assert [len(replica.submitted) for replica in fleet.replicas.values()] == [2, 2, 2]
    assert dispatcher.connections.num_streams == 0
    assert dispatcher.connections.loads.own == {}
    await dispatcher.close()


async def home_without_room(fleet: Fleet, adapter: LoraAdapter) -> FakeReplica:
    """The replica that an adapter is assigned to, whose rows are all a pinned adapter's."""
    pinned = fake_adapter("pinned", 64)
    fleet.adapters[adapter.card.digest] = adapter
    await fleet.assign([adapter.card.digest])
    (home_id,) = fleet.assigned_replicas(adapter.card.digest)
    home = fleet.replicas[home_id]
    home.thread.pin_adapters([pinned.card.digest])
    await asyncio.wrap_future(home.thread.load_adapter(pinned, AdapterRef("pinned", pinned.card.digest, "t")))
    return home


async def test_rows_that_pins_take_on_one_replica_are_no_reason_to_refuse(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    dispatcher, adapter = fleet.dispatcher(), fake_adapter("a", 8)
    home = await home_without_room(fleet, adapter)
    request = make_request("r", [1], adapter, max_tokens=4, ignore_eos=True)
    assert (await collect(dispatcher, request))[0] == expected(request, adapter)
    assert [item.request_id for item in home.submitted] == ["r/1"]
    await dispatcher.close()


async def test_a_begun_stream_that_a_replica_refuses_is_counted_once(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    dispatcher, adapter = fleet.dispatcher(), fake_adapter("a", 8)
    await home_without_room(fleet, adapter)
    request = make_request("r", [1, 2, 3], adapter, max_tokens=8, ignore_eos=True)
    begun = replace(request, resume_token_ids=tuple(expected(request, adapter)[:5]))  # by a replica that died
    assert (await collect(dispatcher, begun))[0] == expected(request, adapter)[5:]
    await until(lambda: len(fleet.consumed) == 2)
    assert fleet.consumed["r/1"][:3] == (3, 0, 5), "by the replica without room"
    assert consumed_by(fleet, request)[:3] == (3, 0, 8)
    await dispatcher.close()


async def test_streams_that_have_begun_continue_where_new_requests_would_be_refused(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1, max_queued_requests=1)
    dispatcher = fleet.dispatcher()
    requests = [make_request(f"r{i}", [i], max_tokens=400, ignore_eos=True) for i in range(4)]
    tasks = []
    for request in requests:
        tokens: list[int] = []
        tasks.append(asyncio.ensure_future(collect(dispatcher, request, tokens)))
        await until(lambda tokens=tokens: len(tokens) > 0)
    (first,) = fleet.replicas
    fleet.add()
    fleet.kill(first)
    for request, (tokens, last) in zip(requests, await asyncio.gather(*tasks), strict=True):
        assert last.error is None
        assert tokens == expected(request)
    await dispatcher.close()


async def test_without_a_replica_the_wait_is_bounded(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(0)
    dispatcher = fleet.dispatcher(replica_timeout_s=0.05)
    with pytest.raises(NotReady, match=r"0\.05 s"):
        await collect(dispatcher, make_request("r", [1]))
    waiting = fleet.dispatcher(replica_timeout_s=120.0)
    task = asyncio.ensure_future(collect(waiting, make_request("r", [1], max_tokens=3)))
    await asyncio.sleep(0.02)
    fleet.add()
    assert (await task)[0] == expected(make_request("r", [1], max_tokens=3))
    await waiting.close()
    await dispatcher.close()


async def test_the_first_request_where_there_is_no_replica_has_one_started(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(0)
    dispatcher = fleet.dispatcher(replica_timeout_s=120.0)
    requests = [make_request(f"r{index}", [1], max_tokens=3) for index in range(3)]
    tasks = [asyncio.ensure_future(collect(dispatcher, request)) for request in requests]
    while not fleet.num_woken:
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert fleet.num_woken == 1, "one call, however many wait and however often they are tried"
    fleet.woken.set()
    assert [tokens for tokens, _ in await asyncio.gather(*tasks)] == [expected(request) for request in requests]
    await dispatcher.close()


async def test_a_request_that_loses_every_replica_is_given_up(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(MAX_LOSSES + 2)
    for replica in fleet.replicas.values():
        replica.backend.max_steps = 5  # never to the end of the answer
    dispatcher = fleet.dispatcher()
    stream = dispatcher.stream(make_request("poison", [1], max_tokens=500, ignore_eos=True))
    num_killed = 0
    while num_killed <= MAX_LOSSES:
        try:
            await anext(stream)
        except EngineFailure as error:
            assert "when they died" in str(error)  # noqa: PT017  the stream is read in steps
            break
        for replica in fleet.replicas.values():
            if replica.submitted and not replica.dead.is_set():
                fleet.kill(replica.replica_id)
                num_killed += 1
    assert num_killed == MAX_LOSSES
    await dispatcher.close()


@pytest.mark.parametrize("position", [12, 30])
async def test_a_request_that_engines_fail_over_takes_two_of_them_and_no_other_request(
    make_fleet: MakeFleet, position: int
) -> None:
    """It does so at its first token, or at a later one; the others may be anywhere."""
    fleet = make_fleet(4)
    dispatcher = fleet.dispatcher()
    pairs = random_requests(fleet, 40, random.Random(position), max_tokens=40)
    poison = make_request("poison", list(range(12)), max_tokens=40, ignore_eos=True)
    poison = replace(poison, sampling=replace(poison.sampling, top_k=13))
    for replica in fleet.replicas.values():
        replica.backend.fails_over = lambda batch: bool(
            ((batch.sampling.top_k == 13) & (batch.sampling.positions == position)).any()
        )
    answers = [asyncio.ensure_future(collect(dispatcher, request)) for request, _ in pairs[:20]]
    given_up = asyncio.ensure_future(collect(dispatcher, poison))
    answers += [asyncio.ensure_future(collect(dispatcher, request)) for request, _ in pairs[20:]]
    for (request, adapter), (tokens, last) in zip(pairs, await asyncio.gather(*answers), strict=True):
        assert last.error is None
        assert tokens == expected(request, adapter)
    tokens, last = await given_up
    assert tokens == expected(poison)[: position - 12], "what was computed is answered"
    assert isinstance(last.error, EngineFailure)
    assert "request poison was being computed when 2 engines failed" in str(last.error)
    assert sum(replica.thread.failure is not None for replica in fleet.replicas.values()) == 2
    assert fleet.view.num_replicas == 2
    assert dispatcher.connections.loads.own == {}
    await dispatcher.close()


@pytest.mark.parametrize("has_adapter", [False, True])
async def test_after_it_none_like_it_costs_an_engine_for_a_while(make_fleet: MakeFleet, has_adapter: bool) -> None:
    """Like it are the tenant's requests for the adapter, or for the base model those with the prompt."""
    fleet, now_s = make_fleet(4), 0.0
    dispatcher = fleet.dispatcher()
    dispatcher.poison = PoisonRequests(lambda: now_s)
    adapter = fake_adapter("bad", 8) if has_adapter else None
    if adapter is not None:
        fleet.adapters[adapter.card.digest] = adapter
    poison = make_request("poison", [1, 2, 3], adapter, ignore_eos=True)
    poison = replace(poison, sampling=replace(poison.sampling, top_k=13))
    for replica in fleet.replicas.values():
        replica.backend.fails_over = lambda batch: bool((batch.sampling.top_k == 13).any())

    def num_failed() -> int:
        return sum(replica.thread.failure is not None for replica in fleet.replicas.values())

    assert isinstance((await collect(dispatcher, poison))[1].error, PoisonRequest)
    assert num_failed() == 2
    refusal: type[AdapterQuarantined | NotReady] = AdapterQuarantined if has_adapter else NotReady
    with pytest.raises(refusal, match="the next one is computed in 5 s") as caught:
        await collect(dispatcher, replace(poison, request_id="again"))
    assert caught.value.retry_after_s == 5.0
    assert num_failed() == 2
    other_prompt = make_request("other prompt", [1, 2], adapter)
    if has_adapter:
        with pytest.raises(AdapterQuarantined, match=r"adapter '.*': engines failed"):
            await collect(dispatcher, other_prompt)
    else:
        assert (await collect(dispatcher, other_prompt))[0] == expected(other_prompt)
    of_another = replace(make_request("another tenant", [1, 2, 3], adapter), tenant_id="another")
    assert (await collect(dispatcher, of_another))[0] == expected(of_another, adapter)
    now_s = 5.0
    again = make_request("mended", [1, 2, 3], adapter)
    assert (await collect(dispatcher, again))[0] == expected(again, adapter)
    await dispatcher.close()


async def test_a_request_that_engines_fail_over_wherever_it_is_takes_three(make_fleet: MakeFleet) -> None:
    """Each computes some of it, so the second is no proof."""
    fleet = make_fleet(MAX_LOSSES + 2)
    for replica in fleet.replicas.values():
        replica.backend.fail_at = 3
    dispatcher = fleet.dispatcher()
    counted = counted_by(dispatcher)
    request = make_request("poison", [1], max_tokens=500, ignore_eos=True)
    tokens, last = await collect(dispatcher, request)
    assert tokens == expected(request)[: len(tokens)]
    assert total([usage for _, usage in counted])[:3] == (1, 0, len(tokens)), "what was answered is billed"
    assert isinstance(last.error, EngineFailure)
    assert sum(replica.thread.failure is not None for replica in fleet.replicas.values()) == 3
    assert fleet.view.num_replicas == MAX_LOSSES + 2 - 3
    assert dispatcher.connections.loads.own == {}
    await dispatcher.close()


async def test_engines_that_fail_over_others_are_no_request_s_fault(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(MAX_LOSSES + 1)
    dispatcher = fleet.dispatcher()
    request = make_request("waiting", [1], max_tokens=30, ignore_eos=True)
    for replica in fleet.replicas.values():
        replica.backend.max_steps = 3  # never to the end of the answer
    answer = asyncio.ensure_future(collect(dispatcher, request))
    for number in range(1, MAX_LOSSES + 2):
        await until(lambda number=number: sum(len(r.submitted) for r in fleet.replicas.values()) == number)
        (replica,) = (r for r in fleet.replicas.values() if r.submitted and r.replica_id not in fleet.off_table)
        assert replica.submitted[0].num_failures == 0
        replica.service._hub.end(EngineFailed("an illegal instruction", suspects=["another/1"]))
        fleet.drop(replica.replica_id)
    fleet.add()
    assert (await answer)[0] == expected(request)
    await dispatcher.close()


async def test_replicas_that_only_drain_are_no_request_s_fault(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(MAX_LOSSES + 2)
    for replica in fleet.replicas.values():
        replica.draining = True
    dispatcher = fleet.dispatcher(replica_timeout_s=120.0)
    request = make_request("r", [1], max_tokens=5, ignore_eos=True)
    task = asyncio.ensure_future(collect(dispatcher, request))
    await until(lambda: len(fleet.unreached_ids) == MAX_LOSSES + 2)
    assert not task.done()
    fleet.add()
    assert (await task)[0] == expected(request)
    await dispatcher.close()


async def test_a_stream_outlives_any_number_of_replicas_that_drained_and_were_stopped(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1)
    dispatcher = fleet.dispatcher(replica_timeout_s=120.0)
    request = make_request("long", [1], max_tokens=300, ignore_eos=True)
    stream = dispatcher.stream(request)
    tokens: list[int] = []
    for round_ in range(MAX_LOSSES + 1):
        (replica,) = (item for item in fleet.replicas.values() if item.replica_id not in fleet.unreached_ids)
        replica.backend.max_steps = replica.backend.num_steps + 5  # never to the end of the answer
        while not any(item.request_id.startswith("long/") for item in replica.submitted):
            tokens += (await anext(stream)).token_ids
        replica.draining = True
        other = make_request(f"other{round_}", [2], max_tokens=2, ignore_eos=True)
        refused = asyncio.ensure_future(collect(dispatcher, other))
        await until(lambda replica=replica: replica.replica_id in fleet.unreached_ids)
        fleet.add()
        assert (await refused)[0] == expected(other)
        fleet.kill(replica.replica_id)
    tokens += [token async for chunk in stream for token in chunk.token_ids]
    assert tokens == expected(request)
    await dispatcher.close()


async def test_a_replica_that_is_slow_to_answer_delays_only_its_own(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    dispatcher = fleet.dispatcher()
    slow, quick = fleet.replicas.values()
    slow.attaches.clear()
    quick.backend.max_steps = 0
    streams = [Stream(make_request(f"r{i}", [i], max_tokens=4, ignore_eos=True)) for i in range(6)]
    dispatcher.router.assign(streams)
    await until(lambda: len(quick.submitted) == 3)
    assert dispatcher.connections.loads.own == {"replica-0": 3, "replica-1": 3}, "those that wait count as load"
    dispatcher.connections.loads.add(quick.replica_id, +1)  # so that the next one goes to the slow replica
    leaver = asyncio.ensure_future(collect(dispatcher, make_request("leaver", [7])))
    await until(lambda: dispatcher.connections.loads.own[slow.replica_id] == 4)
    dispatcher.connections.loads.add(quick.replica_id, -1)
    leaver.cancel()
    await asyncio.wait([leaver])
    assert slow.submitted == []
    slow.attaches.set()
    quick.backend.resumed.set()
    await until(lambda: len(slow.submitted) == 3)
    await until(lambda: dispatcher.connections.num_streams == 0)
    await until(lambda: dispatcher.connections.loads.own == {})
    assert "leaver/1" not in [request.request_id for request in slow.submitted], "it has left"
    await dispatcher.close()


async def test_nothing_is_submitted_for_a_link_that_nobody_reads(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as soon as it is attached, before those who wait for that go on."""
    fleet = make_fleet(1)
    dispatcher = fleet.dispatcher()
    (replica,) = fleet.replicas.values()
    replica.attaches.clear()
    links, submit = [], fleet.submit

    async def submit_and_note(replica_id: str, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        links.append(link_id)
        return await submit(replica_id, link_id, requests)

    monkeypatch.setattr(fleet, "submit", submit_and_note)
    request = make_request("second", [2], max_tokens=4, ignore_eos=True)
    stream = Stream(request)
    dispatcher.router.assign([stream])
    await until(lambda: bool(dispatcher.connections._connections))
    (ended,) = dispatcher.connections._connections.values()
    ended.mark_attached()
    dispatcher.connections._drop(ended, Loss.LINK_ENDED)
    replica.attaches.set()
    await until(lambda: len(stream.inbox) > 0)
    (living,) = dispatcher.connections._connections.values()
    assert links == [living.link_id] != [ended.link_id]
    await until(lambda: dispatcher.connections.num_streams == 0)
    assert dispatcher.connections.loads.own == {}
    await dispatcher.close()


async def test_a_replica_that_never_answers_gives_its_requests_up(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.deployments.ingress.dispatch.replica_connections.ATTACH_TIMEOUT_S", 0.05)
    fleet = make_fleet(1)
    dispatcher = fleet.dispatcher()
    (silent,) = fleet.replicas.values()
    silent.attaches.clear()
    request = make_request("r", [1], max_tokens=4, ignore_eos=True)
    answer = asyncio.ensure_future(collect(dispatcher, request))
    await until(lambda: not dispatcher.connections.usable)
    assert dispatcher.connections.loads.own == {}
    fleet.add()
    assert (await answer)[0] == expected(request)
    assert silent.submitted == []
    assert dispatcher.connections.loads.own == {}
    await dispatcher.close()


async def test_a_failed_engine_takes_no_more_requests(make_fleet: MakeFleet) -> None:
    """Adapters whose home it is would go on failing there until its health check ends it."""
    fleet = make_fleet(2)
    dispatcher = fleet.dispatcher()
    adapter = fake_adapter("a", 8)
    digest = adapter.card.digest
    fleet.adapters[digest] = adapter
    await fleet.assign([digest])
    failing = fleet.replicas[fleet.assigned_replicas(digest)[0]]
    failing.backend.fail_at = 0
    for index, with_adapter in enumerate([adapter, None] * 4):
        request = make_request(f"r{index}", [index], with_adapter, max_tokens=4, ignore_eos=True)
        assert (await collect(dispatcher, request))[0] == expected(request, with_adapter)
    assert [request.request_id for request in failing.submitted] == ["r0/1"]
    assert failing.replica_id not in fleet.view.replicas
    assert dispatcher.connections.loads.own == {}
    await dispatcher.close()


async def test_a_request_that_waits_too_long_for_a_replica_is_late(make_fleet: MakeFleet) -> None:
    dispatcher = make_fleet(0).dispatcher()
    request = make_request("r", [1])
    with pytest.raises(DeadlineExceeded, match="request r took longer"):
        await anext(dispatcher.stream(request, asyncio.get_running_loop().time()))
    await dispatcher.close()


async def test_a_late_request_says_how_much_of_it_was_generated(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1)
    (replica,) = fleet.replicas.values()
    dispatcher, request = fleet.dispatcher(), make_request("r", [1, 2, 3], ignore_eos=True)
    replica.backend.max_steps = 5
    deadline_s, arrived = asyncio.get_running_loop().time() + 5.0, list[int]()

    async def read() -> None:
        async for chunk in dispatcher.stream(request, deadline_s):
            arrived.extend(chunk.token_ids)

    with pytest.raises(DeadlineExceeded) as caught:
        await read()
    assert caught.value.num_tokens == len(arrived) == 5
    await dispatcher.close()


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def test_prompts_that_begin_alike_are_computed_where_that_is_cached(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(4)
    dispatcher = fleet.dispatcher()
    for index in range(12):
        head = [(index % 3) + 8] * 150
        request = make_request(f"r{index}", [*head, index + 8, 9, 10], max_tokens=4, ignore_eos=True)
        tokens, last = await collect(dispatcher, request)
        assert tokens == expected(request)
        assert last.usage is not None
        assert (last.usage.cached_tokens > 100) == (index >= 3)
    await dispatcher.close()


async def test_a_refused_request_is_not_tried_again_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """One as large as a refused one is held back until it may be repeated; others are not."""
    now_s, slept = 100.0, []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("app.deployments.ingress.dispatch.dispatcher.asyncio.sleep", sleep)
    refusals, request = RecentRefusals(lambda: now_s), fake_request("r", [1], tenant_id="flood")
    await refusals.check([request] * 64)
    for _ in range(3):  # the request's own sequences
        refusals.add(request, 64, QueueFull("full", retry_after_s=1.0))
    await refusals.check([request] * 63)
    await refusals.check([fake_request("r", [1], tenant_id="other")] * 64)
    await refusals.check([replace(request, adapter=AdapterRef("a", "digest", "uri"))] * 64)
    assert slept == []
    now_s = 100.25
    with pytest.raises(QueueFull, match="full") as refused:
        await refusals.check([request] * 64)
    assert (slept, refused.value.retry_after_s) == ([0.75], 1.0)
    for hold_s in (2.0, 4.0, 8.0, 8.0):
        now_s += slept[-1]
        await refusals.check([request] * 64)
        refusals.add(request, 64, QueueFull("full", retry_after_s=1.0))
        with pytest.raises(QueueFull):
            await refusals.check([request] * 64)
        assert slept[-1] == hold_s, "refused again and again"
    now_s += 20
    refusals.add(request, 2, QueueFull("full", retry_after_s=1.0))
    with pytest.raises(QueueFull):
        await refusals.check([request] * 2)
    assert slept[-1] == 1.0, "the last refusal is long ago"


async def test_held_back_answers_have_a_bound() -> None:
    refusals, request = RecentRefusals(), fake_request("r", [1], tenant_id="flood")
    refusals.add(request, 1, QueueFull("full", retry_after_s=60.0))
    waiting = [asyncio.create_task(refusals.check([request])) for _ in range(MAX_HELD_BACK)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await asyncio.wait_for(refusals.check([request]), 5)
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    another = asyncio.create_task(refusals.check([request]))
    await asyncio.sleep(0.01)
    assert not another.done(), "a client that leaves makes room"
    for task in (*waiting, another):
        task.cancel()
    for index in range(2 * MAX_REFUSALS):
        refusals.add(fake_request("r", [1], tenant_id=f"t{index}"), 1, QueueFull("full"))
    assert len(refusals._refused) <= MAX_REFUSALS
