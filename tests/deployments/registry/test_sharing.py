"""Several stores on one database: one registry, whoever changes it, and each load is one store's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import select, text

from app.deployments.registry import service
from app.deployments.registry.db.tables import stores as stores_table
from app.deployments.registry.feed import change_feed
from app.deployments.registry.jobs import load_jobs
from app.deployments.registry.jobs.store_leases import BEAT_INTERVAL_S, FIRST_LEASE_S, HANDOVER_S, LEASE_S
from app.deployments.registry.models import DEFAULT_TENANT, FINAL_STATES, Registration, RegistryJob, State
from app.deployments.registry.registry import Registry
from app.deployments.rpc import long_poll_host
from app.deployments.rpc.long_poll_host import Version
from app.engine.errors import AdapterUnloaded, NotReady
from tests.deployments.managed import ADA, MINE, FakeStore, ManagedStore, fails, wanted

CONTENTS = {"one": "d1", "two": "d2", "three": "d3"}


class Stores:
    """Opens stores on one database. `now_s` is what passes for all of them; some machines' clocks are set wrong."""

    def __init__(self, open_again: Callable[..., Registry]) -> None:
        self._open = open_again
        self._opened: list[ManagedStore] = []
        self.now_s = 1_000_000.0

    def open(self, actor: str = "", wrong_by_s: Callable[[], float] = lambda: 0.0) -> ManagedStore:
        store = FakeStore()
        store.contents |= CONTENTS
        registry = self._open(
            clock=lambda: self.now_s + wrong_by_s(), monotonic=lambda: self.now_s - 1_000_000.0, actor=actor
        )
        self._opened.append(ManagedStore(registry, store))
        return self._opened[-1]

    async def pass_s(self, seconds: float, living: Sequence[ManagedStore]) -> None:
        """Time passes while these live: in steps, and each has beaten in every one of them, as it does in truth.

        One clock for all of them that jumped would have each find all others silent.
        """
        query = select(stores_table.c.beat_s)
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + BEAT_INTERVAL_S, end_s)
            for registry in (managed.registry for managed in living):
                mine = query.where(stores_table.c.id == registry.stores.id)

                def has_beaten(registry: Registry = registry, mine: Any = mine) -> bool:
                    with registry.database.read() as connection:
                        return bool(connection.scalar(mine) == registry.database.clock())

                await until(has_beaten)

    async def close(self) -> None:
        for managed in self._opened:
            await managed.close()


@pytest_asyncio.fixture
async def stores(open_again: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stores]:
    for module in (service, change_feed):
        monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(service, "BEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr(load_jobs, "TURN_INTERVAL_S", 0.01)
    monkeypatch.setattr(change_feed, "INGRESS_GRACE_S", 0.0)
    stores = Stores(open_again)
    yield stores
    await stores.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def end_of(managed: ManagedStore, job: RegistryJob) -> RegistryJob:
    async with asyncio.timeout(60):
        while (now := await managed.client.job(job.id, **MINE)).state not in FINAL_STATES:
            await asyncio.sleep(0.002)
    return now


async def test_what_one_store_changes_every_store_serves(stores: Stores) -> None:
    a, b = stores.open(), stores.open()
    for name in ("keep", "gone", "moved"):
        await a.client.load_and_wait(wanted(name, "one"))
    assert b.view.num_adapters == 3, "loaded is routable, also at the ingresses of other stores"
    unload, _ = await a.client.begin_unload("gone", **ADA)
    assert b.view.find("gone", DEFAULT_TENANT) is None, "and unloaded is not"
    await a.client.end_unload(unload)
    await b.client.load_and_wait(wanted("moved", "two"))
    await a.client.load_and_wait(wanted("fresh", "three"))
    await a.client.configure("keep", pinned=True, traffic_weight=3.0, **ADA)
    await b.client.put_alias("alias", {"keep": 1.0, "fresh": 1.0}, **ADA)
    await a.client.remove_alias("alias", **ADA)
    await b.client.put_alias("gone", {"keep": 1.0}, **ADA)
    for managed in (a, b):
        moved = managed.view.adapter("moved", DEFAULT_TENANT)
        assert moved is not None
        assert (moved.ref.generation, moved.ref.digest) == (2, "d2")
        assert managed.view.find("fresh", DEFAULT_TENANT) is not None
        assert managed.view.find("alias", DEFAULT_TENANT) is None
        found = managed.view.resolve("gone", "k", DEFAULT_TENANT)
        assert found is not None
        assert found.name == "keep", "an adapter's name that became an alias's"
        assert managed.registry_service.change_feed.pins.current[1].digests == {"d1"}
        assert managed.registry_service.change_feed.shares.get("d1") == 0.6
        assert managed.store.pinned[-1] == {"d1"}
    assert a.view._entries == b.view._entries


async def test_a_change_waits_for_the_ingresses_of_other_stores(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poll_host, "WATCHER_GRACE_S", 600.0)
    a, b = stores.open(), stores.open()
    b.followers[0].cancel()  # its ingress asked once, and does not take over what comes
    await asyncio.gather(b.followers[0], return_exceptions=True)
    await b.registry_service.change_feed.table.newer(b.registry_service.change_feed.table._version, "ingress", 0.0)
    loading = asyncio.create_task(a.client.load_and_wait(wanted("sql", "one")))
    await until(lambda: a.view.find("sql", DEFAULT_TENANT) is not None)
    await until(lambda: b.registry_service.change_feed.revision == a.registry_service.change_feed.revision)
    assert not loading.done(), "published there, and held by nobody"
    b.followers[0] = asyncio.create_task(b._follow())
    await loading


async def test_a_load_is_one_stores_and_a_dead_ones_is_taken_up_by_one(stores: Stores) -> None:
    a = stores.open()
    gate = a.store.gates["one"] = asyncio.Event()
    job = await a.client.load(wanted("sql", "one"))
    b, c = stores.open(), stores.open()
    for managed in (b, c):
        await managed.registry_service.change_feed.publish_newer()
        beat = await asyncio.to_thread(managed.registry.stores.beat, 0)
        assert beat.adopted == []
        assert a.registry.stores.id in beat.others
    await a.registry_service._tasks.close()  # it hangs, or its machine does: it says nothing any more, but works on
    for managed in (b, c):
        assert a.registry.stores.id in managed.registry.stores.beat(0).others, "its last beat counts from here"
    await stores.pass_s(LEASE_S + 1, [b, c])
    assert (await end_of(b, job)).state is State.LOADED
    assert sorted([*b.store.loads, *c.store.loads]) == ["one"], "by one of them"
    await b.client.load_and_wait(wanted("sql", "two"))
    gate.set()
    await until(lambda: not a.registry_service.loads._tasks)
    entry = b.registry.catalog.get("sql", **MINE)
    assert entry is not None
    assert (entry.ref.digest, entry.ref.generation) == ("d2", 2), "what comes back late changes nothing"
    assert (await end_of(b, job)).state is State.LOADED
    a.registry_service.start()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 90_000.0])
async def test_a_clock_that_is_set_kills_nobody_and_keeps_no_dead_one_alive(stores: Stores, step_s: float) -> None:
    wrong_by_s = [0.0]
    a, b = stores.open(), stores.open(wrong_by_s=lambda: wrong_by_s[0])
    gate = a.store.gates["one"] = asyncio.Event()
    job = await a.client.load(wanted("sql", "one"))
    for managed in (a, b):
        managed.registry.stores.beat(0)
    wrong_by_s[0] = step_s
    for one, other in ((a, b), (b, a), (a, b)):
        beat = one.registry.stores.beat(0)
        assert (set(beat.others), beat.adopted) == ({other.registry.stores.id}, [])
    await b.registry_service._tasks.close()  # its machine is gone
    assert a.registry.stores.beat(0).others, "its last beat counts from when it was seen"
    await stores.pass_s(LEASE_S + 1, [a])
    assert not a.registry.stores.beat(0).others
    gate.set()
    assert (await end_of(a, job)).state is State.LOADED
    assert (a.store.loads, b.store.loads) == (["one"], [])
    b.registry_service.start()


@pytest.mark.parametrize("is_away", ["the database", "one store"])
async def test_nobody_is_dead_for_a_time_in_which_nobody_could_look(stores: Stores, is_away: str) -> None:
    """As when the database was away for everybody: who comes back first takes nothing from those that come after."""
    a, b = stores.open(), stores.open()
    for managed in (a, b):
        await managed.registry_service._tasks.close()  # each beat from here on is this test's
    a.store.gates["one"] = asyncio.Event()
    await a.client.load(wanted("sql", "one"))
    one, other = a.registry.stores, b.registry.stores
    for _ in range(2):
        assert (set(one.beat(0).others), set(other.beat(0).others)) == ({other.id}, {one.id})
    stores.now_s += 10 * LEASE_S
    if is_away == "one store":
        one.beat(0)
    beat = other.beat(0)
    assert (set(beat.others), beat.adopted) == ({one.id}, [])
    num_looks = 0
    while other.others():  # now the other has ended in truth
        stores.now_s += BEAT_INTERVAL_S
        num_looks += 1
    assert num_looks * BEAT_INTERVAL_S <= LEASE_S + BEAT_INTERVAL_S
    assert [job.name for job in other.beat(0).adopted] == ["sql"], "the time in which it looked counts"
    for managed in (a, b):
        managed.registry_service.start()


@pytest.mark.parametrize("wrong_by_s", [-7200.0, 0.0, 7200.0])
async def test_a_store_whose_clock_is_wrong_is_not_dead_to_one_that_comes(stores: Stores, wrong_by_s: float) -> None:
    a = stores.open(wrong_by_s=lambda: wrong_by_s)
    await a.registry_service._tasks.close()  # each beat from here on is this test's
    a.store.gates["one"] = asyncio.Event()
    await a.client.load(wanted("sql", "one"))
    a.registry.stores.beat(0)
    stores.now_s += BEAT_INTERVAL_S / 2
    b = stores.open()
    await b.registry_service._tasks.close()
    beat = b.registry.stores.beat(0)
    assert (set(beat.others), beat.adopted) == ({a.registry.stores.id}, [])
    stores.now_s += BEAT_INTERVAL_S
    a.registry.stores.beat(0)
    assert b.registry.stores.beat(0).others
    while b.registry.stores.beat(0).others:
        stores.now_s += BEAT_INTERVAL_S
    late = stores.open()
    await late.registry_service._tasks.close()
    num_beats = 0
    while a.registry.stores.id in late.registry.stores.beat(0).others:
        stores.now_s += BEAT_INTERVAL_S
        num_beats += 1
    lease_s = LEASE_S if wrong_by_s > 0 else FIRST_LEASE_S
    assert num_beats == lease_s / BEAT_INTERVAL_S + 1, "sooner where its row says, too, that it is dead"
    for managed in (a, b, late):
        managed.registry_service.start()


async def test_a_store_that_was_restarted_takes_up_its_own_loads_at_once(stores: Stores) -> None:
    a = stores.open(actor="the store")
    a.store.gates["one"] = asyncio.Event()
    job = await a.client.load(wanted("sql", "one"))
    await a.registry_service._tasks.close()
    await a.registry_service.loads._work.close()
    again = stores.open(actor="the store")
    assert (await end_of(again, job)).state is State.LOADED
    assert again.registry.stores.replaces_another


async def test_a_store_whose_node_fell_silent_has_its_ingresses_however_late_it_is_back(stores: Stores) -> None:
    """Ray starts it elsewhere after about a minute; its first change waits for the ingresses of the other nodes."""
    a = stores.open(actor="the store")
    await a.registry_service._tasks.close()
    stores.now_s += HANDOVER_S + 10.0
    again = stores.open(actor="the store")
    assert again.registry.stores.replaces_another


async def test_a_store_that_ends_leaves_its_loads_at_once(stores: Stores) -> None:
    a, b = stores.open(), stores.open()
    a.store.gates["one"] = asyncio.Event()
    job = await a.client.load(wanted("sql", "one"))
    await a.registry_service.close()
    assert (await end_of(b, job)).state is State.LOADED
    await a.registry_service.loads._work.close()


async def test_of_many_loads_that_were_left_a_few_of_each_host_are_begun_at_a_time(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_jobs, "MAX_ADOPTED_PER_HOST", 3)
    a = stores.open()
    sources = [f"slow/{number}" for number in range(8)] + ["two"]
    for source in sources:
        a.store.gates[source] = asyncio.Event()
    jobs = [await a.client.load(wanted(f"n{number}", source)) for number, source in enumerate(sources)]
    b = stores.open()
    b.store.contents |= {source: f"d{source}" for source in sources}
    gate = asyncio.Event()
    b.store.gates |= dict.fromkeys(sources[:8], gate)
    await a.kill()
    assert (await end_of(b, jobs[8])).state is State.LOADED, "other hosts wait for nobody"
    assert b.store.loads == [*sources[:3], "two"]
    assert (await b.client.job(jobs[5].id, **MINE)).state is State.REQUESTED
    unload, _ = await b.client.begin_unload("n5", **ADA)
    assert unload.digest is None
    gate.set()
    for number, job in enumerate(jobs):
        assert (await end_of(b, job)).state is (State.FAILED if number == 5 else State.LOADED)
    assert b.store.loads == [*sources[:3], "two", *sources[3:5], *sources[6:8]], "what was unloaded is not read"
    await until(lambda: not b.registry_service.loads._tasks)
    assert (b.registry_service.loads._adopted, b.registry_service.loads._num_adopted_running.total()) == ({}, 0)


async def test_changes_at_once_share_a_look_at_the_database(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    a = stores.open()
    await a.registry_service._tasks.close()  # nobody else looks
    since, num_looks = a.registry.change_query.since, [0]

    def counted(revision: int) -> Any:
        num_looks[0] += 1
        return since(revision)

    monkeypatch.setattr(a.registry.change_query, "since", counted)
    async with a.registry_service.change_feed._publishing:  # as while a look is under way
        looks = [asyncio.create_task(a.registry_service.change_feed.publish_newer()) for _ in range(50)]
        await asyncio.sleep(0.01)
        assert num_looks[0] == 0
    await asyncio.gather(*looks)
    assert num_looks[0] == 1
    for source in ("one", "two"):
        await a.client.load_and_wait(wanted("sql", source))
        ref = a.view.resolve("sql", "", DEFAULT_TENANT)
        assert ref is not None
        assert ref.digest == CONTENTS[source]
    a.registry_service.start()


async def test_loads_of_one_name_take_effect_in_order_whichever_store_is_asked(stores: Stores) -> None:
    a, b = stores.open(), stores.open()
    gate = a.store.gates["one"] = asyncio.Event()
    first = await a.client.load(wanted("sql", "one"))
    second = await b.client.load(wanted("sql", "two"))
    third = await a.client.load(wanted("sql", "three"))
    await b.client.load_and_wait(wanted("other", "two"))
    await until(lambda: b.registry_service.loads._jobs[second.id].state is State.ON_HOST)
    assert b.registry.catalog.get("sql", **MINE) is None
    gate.set()
    generations = [(await end_of(b, job)).generation for job in (first, second, third)]
    assert generations == [1, 2, 3]
    entry = b.registry.catalog.get("sql", **MINE)
    assert entry is not None
    assert entry.ref.digest == "d3"


async def test_an_unload_ends_loads_that_another_store_works_on(stores: Stores) -> None:
    a, b = stores.open(), stores.open()
    gate = a.store.gates["one"] = asyncio.Event()
    waiting = asyncio.create_task(a.client.load_and_wait(wanted("sql", "one")))
    await until(lambda: bool(a.store.loads))
    unload, entry = await b.client.begin_unload("sql", **ADA)
    assert (unload.digest, entry) == (None, None)
    gate.set()
    assert isinstance(await fails(waiting), AdapterUnloaded)
    assert a.registry.catalog.generations("sql", **MINE) == []


async def test_a_registry_that_is_empty_or_older_than_what_is_held_is_no_news(
    stores: Stores,
) -> None:
    a = stores.open()
    await a.client.load_and_wait(wanted("sql", "one"))
    news = await a.client.watch(None, "ingress", 0.0)
    assert news is not None
    held = news[0]
    table = a.registry_service.change_feed.table
    assert (held.origin, held.revision) == (table.origin, a.registry_service.change_feed.revision)
    assert await a.client.watch(held, "ingress", 0.0) is None
    for other, words in (
        (held._replace(epoch="x", origin="another"), "not the one that ingresses follow"),
        (held._replace(epoch="x", revision=held.revision + 1), "but an ingress is at .*; ingresses keep"),
    ):
        for watch in (a.client.watch, a.client.watch_pins, a.client.watch_traffic_shares):
            with pytest.raises(NotReady, match=words):
                await watch(other, "ingress", 0.0)
    assert await a.client.watch(held._replace(epoch="x"), "ingress", 0.0) is not None, "a restart is news"
    assert await a.client.watch(Version("of before", 7), "ingress", 0.0) is not None


async def test_a_database_that_falls_back_is_not_ready_until_it_has_caught_up(stores: Stores) -> None:
    """As after a failover to a standby that lagged behind: what is served stays so, and is not mixed with what it says.

    Had it only lagged, it catches up; then whatever it says counts.
    """
    a = stores.open()
    base = a.registry.database.base_digest
    await a.client.load_and_wait(wanted("sql", "one"))
    await a.client.load_and_wait(wanted("lost", "two"))

    def write(statement: str) -> None:
        with a.registry.database.write() as connection:
            connection.execute(text(statement).bindparams(base=base))

    def revision() -> int:
        with a.registry.database.read() as connection:
            query = text("SELECT revision FROM registries WHERE base_digest = :base").bindparams(base=base)
            return int(connection.execute(query).scalar_one())

    newest = revision()
    for table in ("adapters", "generations"):
        write(f"DELETE FROM {table} WHERE base_digest = :base AND name = 'lost'")
    write("UPDATE registries SET revision = revision - 3 WHERE base_digest = :base")
    for change in (
        a.client.load(wanted("new", "three")),
        a.client.begin_unload("sql", **ADA),
        a.client.put_alias("prod", {"sql": 1.0}, **ADA),
        a.client.register([Registration("unread", "/unread")], **ADA),
        a.client.configure("sql", pinned=True, **ADA),
    ):
        assert "is older than change" in str(await fails(change))
    assert revision() == newest - 3, "no number is given twice"
    with pytest.raises(NotReady, match=r"is older than change .* restart the service to accept the older"):
        await a.registry_service.change_feed.publish_newer()
    assert [name for name in ("sql", "lost") if a.view.find(name, DEFAULT_TENANT)] == ["sql", "lost"]
    write("UPDATE registries SET revision = revision + 4 WHERE base_digest = :base")
    await until(lambda: a.view.find("lost", DEFAULT_TENANT) is None)
    assert a.view.find("sql", DEFAULT_TENANT) is not None
    await a.client.load_and_wait(wanted("lost", "three"))
    assert a.view.find("lost", DEFAULT_TENANT) is not None


async def test_a_database_that_is_away_costs_a_turn_and_nothing_else(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = stores.open(), stores.open()
    real, errors = b.registry.change_query.since, [NotReady("away"), NotReady("away"), RuntimeError("a bug"), None]

    def since(revision: int) -> Any:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        return real(revision)

    monkeypatch.setattr(b.registry.change_query, "since", since)
    await until(lambda: not errors)
    await a.client.load_and_wait(wanted("sql", "one"))
    assert b.view.find("sql", DEFAULT_TENANT) is not None
    said = [record.getMessage().partition("; ")[0] for record in caplog.records if "following" in record.getMessage()]
    assert said == [
        f"following the registry's database: {words}" for words in ("NotReady: away", "RuntimeError: a bug")
    ]
