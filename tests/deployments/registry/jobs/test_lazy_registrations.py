"""Names that are registered without being read: listed at once, read once when they are used, and never given up."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from app.deployments.registry.models import MAX_REGISTRATIONS, Registration, State
from app.deployments.registry.registry import Registry
from app.deployments.registry.traffic_shares import TrafficShares
from app.engine.errors import AdapterFormatError, AdapterUnreadable, InvalidRequest, NotFound, PolyloraError
from tests.deployments.managed import ADA, MINE, FakeStore, ManagedStore, fails, wanted


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Known(ManagedStore):
    """A registry whose ingress knows `sql` and `math`, which nobody has read, and `old`, which is loaded."""

    def state(self, name: str) -> State | None:
        """As an ingress has it."""
        entry = self.view.adapter(name, "default")
        return None if entry is None else entry.state


@pytest_asyncio.fixture
async def known(open_again: Callable[..., Registry]) -> AsyncIterator[Known]:
    store = FakeStore()
    store.contents |= {"hub/sql": "d1", "hub/math": "d2", "hub/old": "d0"}
    managed = Known(open_again(), store, Clock())
    await managed.client.load_and_wait(wanted("old", "hub/old"))
    store.loads.clear()
    await managed.client.register(
        [Registration("sql", "hub/sql", 2.0, "writes SQL"), Registration("math", "hub/math")], **ADA
    )
    yield managed
    await managed.close()


async def test_a_registered_name_is_listed_and_nothing_is_read(known: Known) -> None:
    assert (known.state("sql"), known.state("old")) == (State.REGISTERED, State.LOADED)
    entry = known.view.adapter("sql", "default")
    assert entry is not None
    assert (entry.source, entry.traffic_weight, entry.description, entry.max_rank) == ("hub/sql", 2.0, "writes SQL", 0)
    assert known.store.loads == []
    assert known.registry.catalog.pinned_entries() == []
    assert [entry.name for entry in known.registry.catalog.hot(9)] == [], "there is nothing that a replica could fetch"


async def test_it_is_read_once_however_many_ask_and_keeps_what_was_said_of_it(known: Known) -> None:
    gate = known.store.gates["hub/sql"] = asyncio.Event()
    reads = [asyncio.create_task(known.client.load_for_request("sql", **MINE, who="bob")) for _ in range(5)]
    while known.store.loads != ["hub/sql"]:
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*reads)
    entry = known.view.adapter("sql", "default")
    assert entry is not None
    assert (entry.ref.digest, entry.ref.generation, entry.state) == ("d1", 1, State.LOADED)
    assert (entry.traffic_weight, entry.description, entry.owner) == (2.0, "writes SQL", "ada")
    await known.client.load_for_request("sql", **MINE, who="bob")
    assert known.store.loads == ["hub/sql"], "it is read already"


async def test_who_asks_while_a_load_is_published_waits_until_every_ingress_has_it(known: Known) -> None:
    def is_read() -> bool:
        entry = known.registry.catalog.get("sql", **MINE)
        return entry is not None and entry.is_read

    gate = known.store.gates["hub/sql"] = asyncio.Event()
    first = asyncio.create_task(known.client.load_for_request("sql", **MINE, who="bob"))
    while known.store.loads != ["hub/sql"]:
        await asyncio.sleep(0)
    async with known.registry_service.change_feed._publishing:
        gate.set()
        while not is_read():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(known.client.load_for_request("sql", **MINE, who="eve"))
        await asyncio.wait([second], timeout=0.1)
        assert not second.done(), "an ingress that asks its copy now does not find the adapter"
    await second
    assert known.state("sql") is State.LOADED
    await first


async def test_reading_it_when_asked_is_a_load_like_any_other(known: Known) -> None:
    job, entry = await known.client.load_registered("math", **ADA)
    assert job is not None
    assert (job.state, job.requested_by, entry.ref.digest) == (State.LOADED, "ada", "d2")
    assert (await known.client.load_registered("math", **ADA))[0] is None
    with pytest.raises(NotFound, match="no adapter is registered as 'nobody'"):
        await known.client.load_registered("nobody", **ADA)


async def test_a_failing_read_is_told_to_who_asked_and_remembered(known: Known) -> None:
    known.store.contents["hub/sql"] = AdapterFormatError("tensor 'x' of /srv/secret has NaN")
    error = await fails(known.client.load_for_request("sql", **MINE, who="bob"))
    assert isinstance(error, AdapterUnreadable)
    assert "/srv/secret" not in str(error), "a request is told no place of the server"
    description = await known.client.describe("sql", **MINE)
    assert description.last_error == "tensor 'x' of /srv/secret has NaN"
    assert description.entry is not None
    assert (description.entry.state, known.state("sql")) == (State.REGISTERED, State.REGISTERED)

    await fails(known.client.load_for_request("sql", **MINE, who="bob"))
    assert known.store.loads == ["hub/sql"], "it is left alone for a while"
    known.store.contents["hub/sql"] = "d1"
    known.clock.now_s += 5.0  # type: ignore[attr-defined]
    await known.client.load_for_request("sql", **MINE, who="bob")
    assert (known.state("sql"), (await known.client.describe("sql", **MINE)).last_error) == (State.LOADED, None)


async def test_another_place_is_tried_at_once(known: Known) -> None:
    known.store.contents["hub/sql"] = AdapterFormatError("no config")
    await fails(known.client.load_for_request("sql", **MINE, who="bob"))
    done = await known.client.register([Registration("sql", "hub/math")], **ADA)
    assert done == (1, 0)
    await known.client.load_for_request("sql", **MINE, who="bob")
    entry = known.view.adapter("sql", "default")
    assert entry is not None
    assert (entry.ref.digest, entry.description) == ("d2", "writes SQL"), "what is left out stays as it was"


async def test_a_manifest_may_be_sent_again_and_gives_nothing_up(known: Known) -> None:
    rows = [Registration("sql", "hub/sql"), Registration("old", "hub/old"), Registration("new", "hub/new")]
    revision = known.registry_service.change_feed.revision
    assert await known.client.register(rows, **ADA) == (1, 2)
    assert known.registry_service.change_feed.revision == revision + 1
    assert known.state("old") is State.LOADED
    assert await known.client.register(rows, **ADA) == (0, 3)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([Registration("fine", "x"), Registration("old", "hub/else")], "loaded from 'hub/old'"),
        ([Registration("fine", "x"), Registration("app", "x")], "'app' is an alias"),
        ([Registration("fine", "x"), Registration("fine", "y")], "is given 2 times"),
        ([Registration("fine", "x"), Registration("base", "x")], "the base model's"),
        ([Registration("fine", "x"), Registration("a b", "x")], "must be 1 to 128"),
        ([Registration("fine", "x"), Registration("hub", "hf://org/repo")], "a revision is missing"),
        ([], "a call takes 1 to"),
    ],
)
async def test_all_of_a_manifest_or_nothing(known: Known, rows: list[Registration], said: str) -> None:
    await known.client.put_alias("app", {"sql": 1.0}, **ADA)  # an alias may stand for what is not read
    error = await fails(known.client.register(rows, **ADA))
    assert isinstance(error, InvalidRequest)
    assert said in str(error)
    assert known.state("fine") is None


async def test_more_than_one_call_takes_is_refused(known: Known) -> None:
    rows = [Registration(f"n{number}", "x") for number in range(MAX_REGISTRATIONS + 1)]
    assert "send several" in str(await fails(known.client.register(rows, **ADA)))


async def test_it_is_unloaded_configured_and_never_pinned_unread(known: Known) -> None:
    assert "load it first" in str(await fails(known.client.configure("sql", **ADA, pinned=True)))
    changed = await known.client.configure("sql", **ADA, traffic_weight=3.0, description="SQL")
    assert (changed.traffic_weight, changed.description, changed.state) == (3.0, "SQL", State.REGISTERED)
    await known.client.put_alias("app", {"sql": 1.0}, **ADA)
    assert "alias 'app'" in str(await fails(known.client.begin_unload("sql", **ADA)))
    known_entry = known.view.adapter("math", "default")
    unload, entry = await known.client.begin_unload("math", **ADA)
    assert (unload.digest, unload.job.state, entry) == (None, State.REMOVED, known_entry)
    assert known.state("math") is None
    assert isinstance(await fails(known.client.describe("math", **MINE)), PolyloraError)


async def test_a_name_that_was_unloaded_keeps_counting(known: Known) -> None:
    unload, _ = await known.client.begin_unload("old", **ADA)
    await known.client.register([Registration("old", "hub/math")], **ADA)
    await known.client.end_unload(unload)
    assert known.state("old") is State.REGISTERED, "the unload was of what it meant before"
    _, entry = await known.client.load_registered("old", **ADA)
    assert (entry.ref.generation, entry.ref.digest) == (2, "d2")


async def test_names_outlive_the_process(known: Known, open_again: Callable[..., Registry]) -> None:
    again = ManagedStore(open_again(), known.store, known.clock)
    try:
        async with asyncio.timeout(120):
            while again.view.num_adapters < 3:
                await asyncio.sleep(0.001)
        entry = again.view.adapter("sql", "default")
        assert entry is not None
        assert entry.state is State.REGISTERED
    finally:
        for follower in again.followers:
            follower.cancel()
        await again.registry_service._tasks.close()


def test_an_unread_adapter_has_no_share_of_the_traffic(known: Known) -> None:
    entry = known.view.adapter("sql", "default")
    assert entry is not None
    assert TrafficShares([entry]).value == {}


async def test_one_project_s_registrations_leave_the_write_lock_to_others(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = known.registry_service.change_feed
    change, times = feed.change, []

    async def slow_change(call: Callable[[], object]) -> object:
        began_s = time.monotonic()
        await asyncio.sleep(0.05)
        try:
            return await change(call)
        finally:
            times.append((began_s, time.monotonic()))

    monkeypatch.setattr(feed, "change", slow_change)
    order: list[str] = []

    async def register(tenant_id: str, name: str) -> None:
        await known.unread.register([Registration(name, f"hub/{name}")], tenant_id=tenant_id, who="someone")
        order.append(tenant_id)

    await asyncio.gather(*(register("ada", f"a{number}") for number in range(3)), register("bob", "b"))
    assert order.index("bob") < 3, "before the last of another project that has several"
    for (began_s, ended_s), (next_s, _) in itertools.pairwise(times):
        assert next_s >= ended_s + (ended_s - began_s), "others can write for as long as this call has"
