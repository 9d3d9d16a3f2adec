"""Jobs in every order: what is asked takes effect once, is known everywhere, and outlives the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import pytest_asyncio

from app.deployments.ingress import adapter_admin as management_module
from app.deployments.ingress.adapter_admin import AdapterAdmin
from app.deployments.registry import catalog as catalog_module
from app.deployments.registry import service as service_module
from app.deployments.registry.jobs import load_jobs as loading_module
from app.deployments.registry.jobs import unload_jobs as unloading_module
from app.deployments.registry.jobs.store_leases import Heartbeat
from app.deployments.registry.models import DEFAULT_TENANT, FINAL_STATES, LoadRequest, RegistryJob, State
from app.deployments.registry.pins import EngineCapacity, PinLimits, Pins
from app.deployments.registry.registry import Registry
from app.deployments.rpc.transport import ReplicaGone
from app.engine.errors import (
    AdapterBusy,
    AdapterFormatError,
    AdapterTooLarge,
    AdapterUnloaded,
    EngineFailure,
    InvalidRequest,
    NotFound,
    NotReady,
    QueueFull,
)
from tests.deployments.managed import ADA, MINE, FakeStore, ManagedStore, fails, wanted
from tests.deployments.placed import Placed


@pytest_asyncio.fixture
async def managed(registry: Registry) -> AsyncIterator[ManagedStore]:
    managed = ManagedStore(registry, FakeStore())
    managed.store.contents |= {"one": "d1", "two": "d2", "same": "d1"}
    yield managed
    await managed.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0.002)


async def end_of(managed: ManagedStore, job: RegistryJob) -> RegistryJob:
    async with asyncio.timeout(600):
        while (now := await managed.client.job(job.id, **MINE)).state not in FINAL_STATES:
            await asyncio.sleep(0.002)
    return now


async def test_a_load_goes_through_its_states(managed: ManagedStore) -> None:
    managed.store.gates["one"] = asyncio.Event()
    asked = await managed.client.load(wanted("sql", "one", pinned=True, traffic_weight=3.0))
    assert (asked.state, asked.generation) == (State.REQUESTED, 1)
    await until(lambda: bool(managed.store.loads))
    described = await managed.client.describe("sql", **MINE)
    await until(lambda: managed.registry_service.loads._jobs[asked.id].state is State.VALIDATING)
    assert described.entry is None
    assert managed.view.find("sql", DEFAULT_TENANT) is None
    managed.store.gates["one"].set()
    job = await end_of(managed, asked)
    assert (job.state, job.generation, job.digest) == (State.LOADED, 1, "d1")
    entry = managed.view.adapter("sql", DEFAULT_TENANT)
    assert entry is not None, "loaded is routable"
    assert (entry.ref.uri, entry.pinned, entry.traffic_weight, entry.owner) == ("/roots/one", True, 3.0, "ada")
    described = await managed.client.describe("sql", **MINE)
    assert (described.entry, described.job, described.is_on_host) == (entry, job, True)
    events = [event.event for event in reversed(managed.registry.event_log.events("sql", **MINE))]
    assert sorted(events[1:-1]) == ["downloaded to disk", "downloading", "loaded to host", "registered", "validating"]
    assert (events[0], events[-1]) == ("requested", "routable")


async def test_a_failed_load_keeps_its_reason_and_the_old_meaning(managed: ManagedStore) -> None:
    assert isinstance(await fails(managed.client.load_and_wait(wanted("sql", "absent"))), NotFound)
    described = await managed.client.describe("sql", **MINE)
    assert described.entry is None
    assert described.job is not None
    assert (described.job.state, described.job.reason) == (State.FAILED, "there is no adapter at 'absent'")
    _, first = await managed.client.load_and_wait(wanted("sql", "one"))
    managed.store.contents["broken"] = AdapterFormatError("tensor 'x' has NaN")
    assert isinstance(await fails(managed.client.load_and_wait(wanted("sql", "broken"))), AdapterFormatError)
    described = await managed.client.describe("sql", **MINE)
    assert described.entry == first == managed.view.find("sql", DEFAULT_TENANT)
    assert described.job is not None
    assert described.job.reason == "tensor 'x' has NaN"
    managed.store.contents["bug"] = ValueError("secret")
    with pytest.raises(ValueError, match="secret"):
        await managed.client.load_and_wait(wanted("sql", "bug"))
    described = await managed.client.describe("sql", **MINE)
    assert described.job is not None
    assert "secret" not in str(described.job.reason)


async def test_what_is_refused_after_it_was_read_leaves_host_memory(managed: ManagedStore) -> None:
    catalog = managed.registry.catalog
    catalog.pin_limits = PinLimits(alone=EngineCapacity(rank=4))
    assert isinstance(await fails(managed.client.load_and_wait(wanted("sql", "one"))), AdapterTooLarge)
    assert managed.store.cached_digests == set()
    catalog.pin_limits = PinLimits(adapter_slots=0)
    await managed.client.load_and_wait(wanted("sql", "one"))
    assert isinstance(await fails(managed.client.load_and_wait(wanted("other", "same", pinned=True))), AdapterTooLarge)
    assert managed.store.cached_digests == {"d1"}, "a name means it"


async def test_what_is_refused_stays_for_a_load_that_has_read_it_too(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    managed.registry.catalog.pin_limits = PinLimits(adapter_slots=0)
    written, go_on = threading.Event(), threading.Event()
    register = managed.registry.catalog.register

    def slow(request: LoadRequest, *args: Any) -> Any:
        if request.name == "slow":
            written.set()
            go_on.wait(600)
        return register(request, *args)

    monkeypatch.setattr(managed.registry.catalog, "register", slow)
    job = await managed.client.load(wanted("slow", "one"))
    await until(written.is_set)
    assert isinstance(await fails(managed.client.load_and_wait(wanted("pinned", "same", pinned=True))), AdapterTooLarge)
    assert managed.store.cached_digests == {"d1"}
    go_on.set()
    assert (await end_of(managed, job)).state is State.LOADED
    assert managed.store.cached_digests == {"d1"}


async def test_what_is_refused_stays_while_nobody_can_say_whether_a_name_means_it(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    managed.registry.catalog.pin_limits = PinLimits(alone=EngineCapacity(rank=4))
    monkeypatch.setattr(managed.registry.catalog, "is_used", _away)
    assert isinstance(await fails(managed.client.load_and_wait(wanted("sql", "one"))), AdapterTooLarge)
    assert managed.store.cached_digests == {"d1"}


async def test_names_that_cannot_be(managed: ManagedStore) -> None:
    of_parts = ("../a", "a/", "a//b", "a/../b", "org/load", "proj_1/a")
    for name in (*of_parts, "", "a@1", "a:b", ".a", "x" * 129, "a\n", "é", "base"):
        assert isinstance(await fails(managed.client.load(wanted(name, "one"))), InvalidRequest)
        if name != "base":  # an alias may have the base's name
            assert isinstance(await fails(managed.client.put_alias(name, {"sql": 1}, **ADA)), InvalidRequest)
    for name in ("absent", "a\0b", "../a"):
        assert isinstance(await fails(managed.client.describe(name, **MINE)), NotFound)
    assert isinstance(await fails(managed.client.job("absent", **MINE)), NotFound)
    assert managed.registry.jobs.unfinished_jobs("load") == []


async def test_loads_of_one_name_take_effect_in_the_order_they_were_asked_for(managed: ManagedStore) -> None:
    managed.store.gates["one"] = asyncio.Event()
    first = await managed.client.load(wanted("sql", "one"))
    second = asyncio.create_task(managed.client.load_and_wait(wanted("sql", "two")))
    _, other = await managed.client.load_and_wait(wanted("other", "two"))
    assert other.ref.generation == 1, "a slow source delays only its own name"
    await until(lambda: managed.store.loads.count("two") == 2)
    assert not second.done()
    managed.store.gates["one"].set()
    _, entry = await second
    assert (entry.ref.digest, entry.ref.generation) == ("d2", 2)
    assert (await end_of(managed, first)).generation == 1
    assert managed.view.find("sql", DEFAULT_TENANT) == entry
    job, again = await managed.client.load_and_wait(wanted("sql", "two"))
    assert (again.ref.generation, job.generation) == (2, 2), "equal contents are the same generation"


async def test_a_job_never_goes_back_when_its_source_is_read_again(managed: ManagedStore) -> None:
    managed.store.gates["two"] = asyncio.Event()
    await managed.client.load(wanted("sql", "two"))
    waiting = await managed.client.load(wanted("sql", "one"))  # read at once, but not registered before the first
    await until(lambda: managed.registry_service.loads._jobs[waiting.id].state is State.ON_HOST)
    managed.store.gates["one"] = asyncio.Event()
    other = await managed.client.load(wanted("other", "one"))
    await until(lambda: managed.registry_service.loads._jobs[other.id].state is State.VALIDATING)
    assert (await managed.client.job(waiting.id, **MINE)).state is State.ON_HOST
    for gate in managed.store.gates.values():
        gate.set()
    for job in (waiting, other):
        assert (await end_of(managed, job)).state is State.LOADED
    events = [event.event for event in managed.registry.event_log.events("sql", **MINE)]
    assert events.count("validating") == events.count("downloaded to disk") == 2, "each job went through it once"


async def test_jobs_that_have_ended_leave_nothing_in_memory(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, advance = managed.registry_service.loads, managed.registry.jobs.advance
    ending = threading.Event()

    def advance_slowly(job: RegistryJob, state: State, **what: Any) -> RegistryJob:
        if job.name == "sql":
            ending.wait(600)
        return advance(job, state, **what)

    monkeypatch.setattr(managed.registry.jobs, "advance", advance_slowly)
    first = await managed.client.load(wanted("sql", "one"))
    await until(lambda: managed.view.find("sql", DEFAULT_TENANT) is not None)
    await managed.client.load_and_wait(
        wanted("other", "one")
    )  # the source is read again while the first job's end is written
    ending.set()
    await end_of(managed, first)
    await until(lambda: not loads._tasks)
    assert (loads._jobs, loads._state_times, loads._last_by_name) == ({}, {}, {})


async def test_an_unload_drains_then_frees(managed: ManagedStore) -> None:
    managed.placement = Placed(r1=("d1",), r2=("d1",), r3=())
    management = AdapterAdmin(managed.client, managed, managed.placement)
    await managed.client.load_and_wait(wanted("sql", "one"))
    await managed.client.load_and_wait(wanted("twin", "same"))
    assert [replica.replica_id for replica in await managed.placement.residency("d1")] == ["r1", "r2"]
    job, _ = await management.unload("twin", **ADA)
    assert job.state is State.REMOVED
    assert managed.dropped == [], "another name means the same contents"
    assert managed.store.cached_digests == {"d1"}
    managed.drop_gate.clear()
    leaving = asyncio.create_task(management.unload("sql", **ADA))
    await until(lambda: managed.view.find("sql", DEFAULT_TENANT) is None)
    described = await managed.client.describe("sql", **MINE)
    assert described.entry is None
    assert described.job is not None
    assert described.job.state is State.DRAINING, "no new request, but the running ones go on"
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    managed.drop_gate.set()
    assert (await end_of(managed, described.job)).state is State.REMOVED, "whoever asked may leave"
    assert sorted(managed.dropped) == [("r1", "d1"), ("r2", "d1")]
    assert managed.store.cached_digests == set()
    assert isinstance(await fails(managed.client.describe("sql", **MINE)), NotFound)
    assert isinstance(await fails(management.unload("sql", **ADA)), NotFound)
    _, entry = await managed.client.load_and_wait(wanted("sql", "one"))
    assert entry.ref.generation == 2, "what was removed and returns is a new generation"


@pytest.mark.parametrize("is_registered", [True, False])
async def test_an_unload_is_not_overtaken_by_loads_that_were_asked_for_before(
    managed: ManagedStore, open_again: Callable[[], Registry], is_registered: bool
) -> None:
    management = AdapterAdmin(managed.client, managed, Placed())
    if is_registered:
        await managed.client.load_and_wait(wanted("sql", "one"))
    gate = managed.store.gates["two"] = asyncio.Event()
    pending = await managed.client.load(wanted("sql", "two"))
    waiting = asyncio.create_task(managed.client.load_and_wait(wanted("sql", "two")))
    other = await managed.client.load(wanted("other", "two"))
    await until(lambda: managed.store.loads.count("two") == 3)
    job, entry = await management.unload("sql", **ADA)
    assert (job.kind, job.state, job.digest) == ("unload", State.REMOVED, "d1" if is_registered else None)
    assert (entry is not None) == is_registered
    assert isinstance(await fails(waiting), AdapterUnloaded), "at once, not when it has been read"
    ended = await end_of(managed, pending)
    assert (ended.state, ended.generation) == (State.FAILED, None)
    assert "'sql' was unloaded while it was being loaded" in str(ended.reason)
    assert [item.name for item in open_again().jobs.unfinished_jobs("load")] == ["other"]
    gate.set()
    assert (await end_of(managed, other)).state is State.LOADED, "another name's load goes on"
    await until(lambda: not managed.registry_service.loads._tasks)
    assert managed.registry_service.loads._cancelled == {}
    assert managed.view.find("sql", DEFAULT_TENANT) is None
    assert isinstance(await fails(managed.client.describe("sql", **MINE)), NotFound)
    assert isinstance(await fails(management.unload("sql", **ADA)), NotFound), "there is nothing left to cancel"
    _, entry = await managed.client.load_and_wait(wanted("sql", "two"))
    assert entry.ref.generation == 1 + is_registered, "what never took effect is no generation"
    assert managed.view.find("sql", DEFAULT_TENANT) == entry


async def test_the_newest_load_of_the_tenant_with_most_fails_for_one_of_a_tenant_with_fewer(
    managed: ManagedStore,
) -> None:
    loads = managed.registry_service.loads
    loads._places.max_total = 3
    gate = managed.store.gates["one"] = asyncio.Event()
    flood = [await managed.client.load(wanted(f"flood{number}", "one")) for number in range(3)]
    refused = await fails(managed.client.load(wanted("flood3", "one")))
    assert isinstance(refused, QueueFull)
    assert "the number of loads at a time is 3" in str(refused)
    assert isinstance(await fails(managed.client.describe("flood3", **MINE)), NotFound), "it has left no job"
    await managed.client.load(replace(wanted("mine", "one"), tenant_id="victim"))
    ended = await end_of(managed, flood[2])
    assert ended.state is State.FAILED
    assert "the number of loads at a time is 3" in str(ended.reason)
    gate.set()
    assert [(await end_of(managed, job)).state for job in flood[:2]] == [State.LOADED] * 2
    await until(lambda: not loads._jobs)
    assert managed.view.find("mine", "victim") is not None
    assert len(loads._places) == 0


async def test_a_load_that_was_read_before_the_unload_and_waits_its_turn_does_not_come_after_it(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands before the registry's door while the unload goes through."""
    register = managed.registry.catalog.register
    arrived, may_go = threading.Event(), threading.Event()

    def register_late(*args: Any, **options: Any) -> Any:
        arrived.set()
        may_go.wait(600)
        return register(*args, **options)

    monkeypatch.setattr(managed.registry.catalog, "register", register_late)
    pending = await managed.client.load(wanted("sql", "one"))
    await asyncio.to_thread(arrived.wait, 600)
    drained = managed.registry.catalog.begin_unload("sql", **ADA)  # as another process would
    may_go.set()
    assert drained.cancelled == [pending.id]
    assert (await end_of(managed, pending)).state is State.FAILED
    assert managed.registry.catalog.entries() == []
    assert managed.registry.catalog.generations("sql", **MINE) == []


async def test_an_unload_that_is_refused_cancels_nothing(managed: ManagedStore) -> None:
    await managed.client.load_and_wait(wanted("sql", "one"))
    await managed.client.put_alias("app", {"sql": 1.0}, **ADA)
    managed.store.gates["two"] = asyncio.Event()
    pending = await managed.client.load(wanted("sql", "two"))
    assert isinstance(await fails(managed.client.begin_unload("sql", **ADA)), AdapterBusy)
    managed.store.gates["two"].set()
    job = await end_of(managed, pending)
    assert (job.state, job.generation) == (State.LOADED, 2)


async def test_an_unload_of_a_name_that_never_loaded_forgets_its_failure(managed: ManagedStore) -> None:
    for _ in range(2):
        await fails(managed.client.load_and_wait(wanted("sql", "absent")))
    _, entry = await managed.client.begin_unload("sql", **ADA)
    assert entry is None
    assert isinstance(await fails(managed.client.describe("sql", **MINE)), NotFound)
    assert isinstance(await fails(managed.client.begin_unload("sql", **ADA)), NotFound), "once"
    newest = (await managed.client.events("sql", limit=1, before=None, **MINE))[0]
    assert newest.event == "removed"
    await managed.client.load_and_wait(wanted("sql", "one"))
    assert isinstance(await fails(managed.client.load_and_wait(wanted("sql", "absent"))), NotFound)
    await managed.client.begin_unload("sql", **ADA)
    assert managed.view.find("sql", DEFAULT_TENANT) is None, "an adapter is unloaded, whatever its last load"


async def test_a_load_that_is_asked_for_after_an_unload_takes_effect(managed: ManagedStore) -> None:
    managed.store.gates["one"] = asyncio.Event()
    before = await managed.client.load(wanted("sql", "one"))
    await managed.client.begin_unload("sql", **ADA)
    after = asyncio.create_task(managed.client.load_and_wait(wanted("sql", "one")))
    managed.store.gates["one"].set()
    _, entry = await after
    assert (await end_of(managed, before)).state is State.FAILED
    assert managed.view.find("sql", DEFAULT_TENANT) == entry


@pytest.mark.parametrize("error", [EngineFailure("on fire"), NotReady("reached r2"), ReplicaGone("r1")])
async def test_an_unload_ends_although_a_replica_cannot_free_its_rows(managed: ManagedStore, error: Exception) -> None:
    managed.placement = Placed(r1=("d1",), r2=("d1",))
    managed.drop_errors = {"r1": error}
    management = AdapterAdmin(managed.client, managed, managed.placement)
    await managed.client.load_and_wait(wanted("sql", "one"))
    job, _ = await management.unload("sql", **ADA)
    assert job.state is State.REMOVED
    assert managed.dropped == [("r2", "d1")]
    assert managed.store.cached_digests == set()


async def test_an_unload_whose_ingress_ends_is_taken_up_by_another(
    managed: ManagedStore, open_again: Callable[[], Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    managed.placement = Placed(r1=("d1",))
    first, second = (AdapterAdmin(managed.client, managed, managed.placement) for _ in range(2))
    await managed.client.load_and_wait(wanted("sql", "one"))
    managed.drop_gate.clear()
    job, _ = await first.unload("sql", wait=False, **ADA)
    await until(lambda: job.id in first._draining)
    monkeypatch.setattr(unloading_module, "ORPHAN_TIMEOUT_S", 1e9)
    await second.resume_unloads()
    assert second._draining == set(), "its ingress may be at it"
    monkeypatch.setattr(unloading_module, "ORPHAN_TIMEOUT_S", -1.0)
    num_tasks = len(first._tasks)
    await first.resume_unloads()
    assert len(first._tasks) == num_tasks, "it sees to it"
    await first.close()  # the process of the ingress ends
    assert (await managed.client.job(job.id, **MINE)).state is State.DRAINING
    after = ManagedStore(open_again(), managed.store)  # so does the registry's
    third = AdapterAdmin(after.client, managed, managed.placement)
    await third.resume_unloads()
    managed.drop_gate.set()
    assert (await end_of(after, job)).state is State.REMOVED
    assert (managed.dropped, managed.store.cached_digests) == ([("r1", "d1")], set())
    await second.resume_unloads()
    await third.resume_unloads()
    await until(lambda: not second._tasks and not third._tasks)
    assert len(managed.dropped) == 1, "it is over"
    await after.close()


async def test_an_unload_is_seen_to_while_an_ingress_says_so(
    open_again: Callable[[], Registry],
) -> None:
    now_s = [time.time()]
    managed = ManagedStore(open_again(), FakeStore(), lambda: now_s[0])
    managed.store.contents["one"] = "d1"
    await managed.client.load_and_wait(wanted("sql", "one"))
    unload, _ = await managed.client.begin_unload("sql", **ADA)
    began_s = unload.job.created_s
    orphaned = managed.client.orphaned_unloads
    for after_s, own_ids, expected in (
        (unloading_module.ORPHAN_TIMEOUT_S - 5, [unload.job.id], []),
        (2 * unloading_module.ORPHAN_TIMEOUT_S - 10, [], []),
        (2 * unloading_module.ORPHAN_TIMEOUT_S, [], [unload]),
        (3 * unloading_module.ORPHAN_TIMEOUT_S - 5, [], []),  # whoever was given it sees to it
        (3 * unloading_module.ORPHAN_TIMEOUT_S + 5, [], [unload]),
    ):
        now_s[0] = began_s + after_s
        assert await orphaned(own_ids) == expected
    await managed.client.end_unload(unload)
    assert await orphaned([]) == []
    assert managed.registry_service.unloads._seen_s == {}
    await managed.close()


async def test_contents_are_gone_when_names_have_meant_them_and_none_does(managed: ManagedStore) -> None:
    management = AdapterAdmin(managed.client, managed, Placed())
    for name, source in (("kept", "one"), ("same", "one"), ("changed", "two")):
        await managed.client.load_and_wait(wanted(name, source))
    every = ["d1", "d2", "d3", "never heard of"]
    assert await managed.client.unreferenced_digests(every) == []
    managed.store.contents["three"] = "d3"
    await managed.client.load_and_wait(wanted("changed", "three"))
    assert await managed.client.unreferenced_digests(every) == ["d2"]
    await management.unload("same", **ADA)
    assert await managed.client.unreferenced_digests(every) == ["d2"], "another name means the same contents"
    await management.unload("kept", **ADA)
    assert sorted(await managed.client.unreferenced_digests(every)) == ["d1", "d2"]
    await managed.client.load_and_wait(wanted("kept", "two"))
    assert await managed.client.unreferenced_digests(every) == ["d1"]
    await management.close()


async def test_an_unload_whose_end_the_database_did_not_take_ends_later(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    management = AdapterAdmin(managed.client, managed, Placed())
    await managed.client.load_and_wait(wanted("sql", "one"))
    with monkeypatch.context() as patch:
        patch.setattr(managed.registry.catalog, "finish_unload", _away)
        assert isinstance(await fails(management.unload("sql", **ADA)), NotReady)
    described = await managed.client.describe("sql", **MINE)
    assert described.job is not None
    assert described.job.state is State.DRAINING
    monkeypatch.setattr(unloading_module, "ORPHAN_TIMEOUT_S", -1.0)
    await management.resume_unloads()
    assert (await end_of(managed, described.job)).state is State.REMOVED
    assert isinstance(await fails(managed.client.describe("sql", **MINE)), NotFound)


async def test_an_unload_that_could_not_be_written_down_did_not_begin(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, entry = await managed.client.load_and_wait(wanted("sql", "one"))
    with monkeypatch.context() as patch:
        patch.setattr(catalog_module, "insert_job", _away)
        assert isinstance(await fails(managed.client.begin_unload("sql", **ADA)), NotReady)
    assert managed.view.find("sql", DEFAULT_TENANT) == entry == managed.registry.catalog.get("sql", **MINE), (
        "served, and known to be"
    )
    assert (await AdapterAdmin(managed.client, managed, Placed()).unload("sql", **ADA))[0].state is State.REMOVED


async def test_a_name_that_returns_while_it_drains_is_served(managed: ManagedStore) -> None:
    management = AdapterAdmin(managed.client, managed, Placed(r1=("d1",)))
    await managed.client.load_and_wait(wanted("sql", "one"))
    managed.drop_gate.clear()
    leaving = asyncio.create_task(management.unload("sql", **ADA))
    await until(lambda: managed.view.find("sql", DEFAULT_TENANT) is None)
    _, back = await managed.client.load_and_wait(wanted("sql", "one"))
    managed.drop_gate.set()
    await leaving
    assert managed.view.find("sql", DEFAULT_TENANT) == back
    assert (await managed.client.describe("sql", **MINE)).entry == back
    assert managed.store.cached_digests == {"d1"}


@pytest.mark.parametrize("name", ["sql", "twin"])
async def test_an_unload_ends_although_its_contents_are_used_again(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The same digest: requests that came since keep its rows, and those that it waits for are not told apart."""
    monkeypatch.setattr(management_module, "STILL_USED_INTERVAL_S", 0.01)
    management = AdapterAdmin(managed.client, managed, Placed(r1=("d1",)))
    await managed.client.load_and_wait(wanted("sql", "one"))
    managed.drop_gate.clear()  # there is always some request for it
    job, _ = await management.unload("sql", wait=False, **ADA)
    assert (await managed.client.job(job.id, **MINE)).state not in FINAL_STATES
    _, back = await managed.client.load_and_wait(wanted(name, "one"))
    assert (await end_of(managed, job)).state is State.REMOVED
    assert managed.view.find(name, DEFAULT_TENANT) == back
    assert managed.store.cached_digests == {"d1"}
    assert managed.dropped == []
    managed.drop_gate.set()
    await until(lambda: not management._tasks)


async def test_a_drain_goes_on_while_the_registry_is_away(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(management_module, "STILL_USED_INTERVAL_S", 0.01)
    management = AdapterAdmin(managed.client, managed, Placed(r1=("d1",)))
    await managed.client.load_and_wait(wanted("sql", "one"))
    managed.drop_gate.clear()
    questions = []

    def is_used(digest: str) -> NoReturn:
        questions.append(digest)
        _away()

    with monkeypatch.context() as patch:
        job, _ = await management.unload("sql", wait=False, **ADA)
        patch.setattr(managed.registry.catalog, "is_used", is_used)
        await until(lambda: len(questions) > 2)
    assert (await managed.client.job(job.id, **MINE)).state not in FINAL_STATES
    managed.drop_gate.set()
    assert (await end_of(managed, job)).state is State.REMOVED


async def test_aliases_pins_and_weights_are_known_everywhere(managed: ManagedStore) -> None:
    management = AdapterAdmin(managed.client, managed, Placed())
    for name, source in (("v1", "one"), ("v2", "two")):
        await managed.client.load_and_wait(wanted(name, source))
    await managed.client.put_alias("sql", {"v1": 1.0}, **ADA)
    assert managed.view.resolve("sql", "k", DEFAULT_TENANT) == managed.view.resolve("v1", "k", DEFAULT_TENANT)
    await managed.client.put_alias("sql", {"v2": 1.0}, **ADA)
    assert managed.view.resolve("sql", "k", DEFAULT_TENANT) == managed.view.resolve("v2", "k", DEFAULT_TENANT)
    await managed.client.roll_back_alias("sql", None, **ADA)
    assert managed.view.resolve("sql", "k", DEFAULT_TENANT) == managed.view.resolve("v1", "k", DEFAULT_TENANT)
    assert isinstance(await fails(management.unload("v1", **ADA)), AdapterBusy)
    await managed.client.remove_alias("sql", **ADA)
    assert managed.view.find("sql", DEFAULT_TENANT) is None
    entry = await managed.client.configure("v1", pinned=True, traffic_weight=0.5, **ADA)
    assert managed.view.find("v1", DEFAULT_TENANT) == entry
    assert (entry.pinned, entry.traffic_weight) == (True, 0.5)


async def test_the_next_process_takes_up_everything(managed: ManagedStore, open_again: Callable[[], Registry]) -> None:
    await managed.client.load_and_wait(wanted("kept", "two", pinned=True))
    await managed.client.put_alias("alias", {"kept": 1.0}, **ADA)
    await managed.client.load_and_wait(wanted("leaving", "one"))
    unload, _ = await managed.client.begin_unload("leaving", **ADA)
    managed.store.gates["one"] = asyncio.Event()
    cut_short = await managed.client.load(wanted("cut", "one", traffic_weight=2.0))
    await managed.client.observe("r1", ["d2"], [], {"d2": 5.0})
    await managed.client.hot(5)  # writes use down
    await managed.kill()
    after = ManagedStore(open_again(), FakeStore())
    after.store.contents = dict(managed.store.contents)
    after.registry_service.start()
    job = await end_of(after, cut_short)
    assert (job.state, job.generation) == (State.LOADED, 1)
    assert after.store.loads == ["one"], "what is registered is not read again before it is used"
    await until(lambda: after.view.num_adapters == 2)
    for name in ("kept", "alias", "cut", "leaving"):
        assert (after.view.find(name, DEFAULT_TENANT) is None) == (name == "leaving")
    entry = after.view.adapter("cut", DEFAULT_TENANT)
    assert entry is not None
    assert (entry.owner, entry.traffic_weight) == ("ada", 2.0)
    assert (await after.client.job(unload.job.id, **MINE)).state is State.DRAINING, "engines may still be at it"
    assert [item.name for item in await after.client.hot(5)] == ["kept"]
    events = after.registry.event_log.events("kept", **MINE)
    assert (events[0].event, events[0].replica_id) == ("loaded to device", "r1")
    await after.close()


async def test_what_was_cut_short_is_taken_up_although_the_database_was_away_at_first(
    managed: ManagedStore, open_again: Callable[[], Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    managed.store.gates["two"] = asyncio.Event()
    cut_short = await managed.client.load(wanted("cut", "two"))
    await managed.kill()
    registry = open_again()
    monkeypatch.setattr(service_module, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(service_module, "BEAT_INTERVAL_S", 0.01)
    beats = []

    def beat(revision: int) -> Heartbeat:
        beats.append(revision)
        if len(beats) < 3:
            _away()
        return real_beat(revision)

    real_beat = registry.stores.beat
    monkeypatch.setattr(registry.stores, "beat", beat)
    after = ManagedStore(registry, FakeStore())
    after.store.contents = dict(managed.store.contents)
    assert (await end_of(after, cut_short)).state is State.LOADED
    assert after.store.loads == ["two"]
    await after.close()


@pytest.mark.parametrize(("source", "end"), [("one", State.LOADED), ("absent", State.FAILED)])
async def test_the_end_of_a_load_is_written_down_when_the_database_is_back(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch, source: str, end: State
) -> None:
    registry_service, advance = managed.registry_service, managed.registry.jobs.advance
    away = threading.Event()
    away.set()

    def advance_or_not(job: RegistryJob, state: State, **what: Any) -> RegistryJob:
        if away.is_set():
            _away()
        return advance(job, state, **what)

    monkeypatch.setattr(loading_module, "RETRY_S", 0.01)
    monkeypatch.setattr(managed.registry.jobs, "advance", advance_or_not)
    if end is State.LOADED:
        job, entry = await managed.client.load_and_wait(wanted("sql", source))
        assert (job.state, job.generation, managed.view.find("sql", DEFAULT_TENANT)) == (State.LOADED, 1, entry)
    else:
        assert isinstance(await fails(managed.client.load_and_wait(wanted("sql", source))), NotFound), (
            "what was wrong with it"
        )
    (unfinished,) = managed.registry.jobs.unfinished_jobs("load")
    away.clear()
    job = await end_of(managed, unfinished)
    assert (job.state, job.digest) == (end, "d1" if end is State.LOADED else None)
    events = [event.event for event in managed.registry.event_log.events("sql", **MINE)]
    assert events.count("downloading") == events.count("routable" if end is State.LOADED else "failed") == 1
    await until(lambda: not registry_service.loads._writing)


def _away(*_: object, **__: object) -> NoReturn:
    raise NotReady("the database does not answer")


async def test_what_is_observed_again_is_in_the_journal_once(
    managed: ManagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica tells again what the registry could not write down."""
    await managed.client.load_and_wait(wanted("sql", "one"))
    with monkeypatch.context() as patch:
        patch.setattr(managed.registry.catalog, "note_residency", _away)
        for _ in range(2):
            assert isinstance(await fails(managed.client.observe("r1", ["d1"], [], {"d1": 5.0})), NotReady)
    await managed.client.observe("r1", ["d1"], [], {"d1": 5.0})
    events = [event.event for event in managed.registry.event_log.events("sql", **MINE)]
    assert events.count("loaded to device") == 1
    assert [item.name for item in await managed.client.hot(5)] == ["sql"]


async def test_many_at_once_end_as_the_database_says(managed: ManagedStore) -> None:
    """The table follows the database, whatever overtakes what."""
    management = AdapterAdmin(managed.client, managed, Placed())

    async def churn(name: str, index: int) -> None:
        for step in range(4):
            with contextlib.suppress(NotFound, AdapterUnloaded):
                if (step + index) % 3:
                    await managed.client.load_and_wait(wanted(name, ("one", "two")[(step * index) % 2]))
                else:
                    await management.unload(name, **ADA)

    await asyncio.gather(*(churn(f"n{index % 3}", index) for index in range(9)))
    entries = managed.registry.catalog.entries()
    found = managed.view.page((type(entries[0]),) if entries else (), limit=100, **MINE).entries
    assert list(found) == entries
    assert managed.registry.jobs.unfinished_jobs("load") == []


async def test_pins_reach_the_tiers_and_the_replicas_and_leave_them(managed: ManagedStore) -> None:
    registry_service, store = managed.registry_service, managed.store
    version, pins = registry_service.change_feed.pins.current
    assert pins == Pins()
    await managed.client.load_and_wait(wanted("sql", "one", pinned=True))
    await managed.client.load_and_wait(wanted("plain", "two"))
    news = await managed.client.watch_pins(version, "replica", 10.0)
    assert news is not None
    assert [entry.name for entry in news[1].entries] == ["sql"]
    assert store.pinned == [set(), {"d1"}]
    await managed.client.configure("plain", pinned=True, traffic_weight=3.0, **ADA)
    _, pins = registry_service.change_feed.pins.current
    assert [entry.name for entry in pins.entries] == ["plain", "sql"], "the heavier first"
    news = await registry_service.change_feed.shares.newer(None, "placement", 1.0)
    assert news is not None
    assert dict(news[1].rows) == {"d2": 0.75}
    await managed.client.configure("sql", pinned=False, **ADA)
    assert store.pinned[-1] == {"d2"}
    await managed.client.load_and_wait(wanted("plain", "one"))
    assert store.pinned[-1] == {"d1"}, "the pin is the name's"
    await managed.client.begin_unload("plain", **ADA)
    assert store.pinned[-1] == set()
    assert registry_service.change_feed.pins.current[1] == Pins()


async def test_a_restart_pins_what_is_pinned_before_anything_is_read(open_again: Callable[[], Registry]) -> None:
    first = ManagedStore(open_again(), FakeStore())
    first.store.contents["one"] = "d1"
    await first.client.load_and_wait(wanted("sql", "one", pinned=True))
    await first.close()
    second = ManagedStore(open_again(), FakeStore())
    assert second.store.pinned == [{"d1"}]
    assert second.registry_service.change_feed.pins.current[1].digests == {"d1"}
    await second.close()


async def test_moves_between_tiers_are_in_the_journal(managed: ManagedStore) -> None:
    managed.events.on_move("deleted from disk", "d1")
    await managed.client.load_and_wait(wanted("sql", "one"))
    managed.events.on_move("deleted from host", "d1")
    await asyncio.to_thread(managed.events.on_move, "fetched again", "d1")

    def told() -> list[str]:
        events = [event.event for event in reversed(managed.registry.event_log.events("sql", **MINE))]
        return [event for event in events if event in ("deleted from host", "fetched again")]

    await until(lambda: len(told()) == 2)
    assert told() == ["deleted from host", "fetched again"]
