"""Placement over time: what it publishes and how much, its restarts, its settings, and the shares that it follows."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Mapping

import pytest

from app.config import PlacementConfig
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import (
    DrainingReplica,
    ReplicaDelta,
    ReplicaIdentity,
    ReplicaLoad,
    ReplicaReport,
)
from app.deployments.placement.placer import LoadTableClient, PlacementTableClient
from app.deployments.placement.service import (
    LOADS_FLOOR_S,
    MAX_SCALING_DECISIONS,
    TABLE_FLOOR_S,
    PlacementService,
    TrafficShareChanges,
)
from app.deployments.rpc.long_poll_client import Watch
from app.deployments.rpc.long_poll_host import LongPollTable, Version
from app.engine.errors import NotReady
from load_tests.virtual_time import run_virtually
from tests.deployments.placement.reporting_fleet import digests


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Stores:
    """The shares of stores by name, and who follows which."""

    def __init__(self, **shares: Mapping[str, float]) -> None:
        self.published: dict[str, LongPollTable[str, float]] = {}
        self.followed: list[str] = []
        for name, value in shares.items():
            self.published[name] = LongPollTable(now_s)
            self.published[name].publish(value)

    def watch(self, name: str) -> Watch[TrafficShareChanges]:
        self.followed.append(name)
        return self.published[name].newer


class Life:
    """One life of the placement actor, on the virtual clock."""

    def __init__(self, stores: Stores | None = None, config: PlacementConfig | None = None) -> None:
        self.service = PlacementService(
            config or PlacementConfig(), (stores or Stores(store={})).watch, lambda: None, now_s
        )
        self.reporters: dict[str, DeltaReporter] = {}

    async def report(
        self,
        replica_id: str,
        *resident: str,
        load: int = 0,
        store: str = "store",
        settings: PlacementConfig | None = None,
        is_draining: bool = False,
    ) -> bool:
        origin = ReplicaIdentity(store, (settings or PlacementConfig()).model_dump_json(), now_s())
        reporter = self.reporters.setdefault(replica_id, DeltaReporter(origin))
        state = ReplicaReport(replica_id, load, resident=tuple(sorted(resident)))
        if await self.service.report(reporter.next_delta(state, is_draining=is_draining)):
            return True
        reporter.reset()
        assert await self.service.report(reporter.next_delta(state, is_draining=is_draining))
        return False

    async def settle(self) -> None:
        await asyncio.sleep(PlacementConfig().report_interval_s + 0.6)

    async def watched(self) -> PlacementTableClient:
        """A new copy of the table, as it is now."""
        copy = PlacementTableClient(self.service.watch, "a new one")
        news = await self.service.watch(None, "a new one", 1.0)
        if news is not None:
            copy.apply(*news)
        return copy


def virtually(test: Callable[[], object]) -> Callable[[], None]:
    """A test on the virtual clock."""

    def run() -> None:
        run_virtually(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtually
async def test_a_restart_replaces_no_table_by_half_a_one() -> None:
    before = Life()
    await before.report("r0")
    held, _ = await before.service.watch(None, "ingress", 60.0) or pytest.fail("no news")
    after = Life()
    watching = asyncio.create_task(after.service.watch(held, "ingress", 60.0))
    await after.report("r0")
    with pytest.raises(NotReady):
        await after.service.assign(["digest"])
    first = await after.watched()
    assert set(first.view.replicas) == {"r0"}, "one without a table is given what there is"
    await asyncio.sleep(1.0)
    assert not watching.done()
    await after.report("r1", "digest")
    _, news = await watching or pytest.fail("no news")
    assert {key[1] for key, _ in news.rows if key[0] == "replica"} == {"r0", "r1"}
    assert await after.service.assign(["digest"]) == {"digest": ("r1",)}
    await before.service.close()
    await after.service.close()


@virtually
async def test_an_ingress_hears_of_changes_ten_times_a_second_at_most_and_of_nothing_else() -> None:
    life = Life()
    for index in range(100):
        await life.report(f"r{index}", *digests(255, seed=index))
    await life.settle()
    copy = PlacementTableClient(life.service.watch, "ingress")
    takes: list[tuple[float, int, int]] = []
    take = copy.apply

    def note(version: Version, news: object) -> None:
        take(version, news)  # type: ignore[arg-type]
        takes.append((now_s(), len(news.rows), len(pickle.dumps((version, news)))))  # type: ignore[attr-defined]

    copy.apply = note  # type: ignore[method-assign]
    follower = asyncio.create_task(copy.follow())
    await asyncio.sleep(1.0)
    assert sum(num_rows for _, num_rows, _ in takes) == 100 + 25_500, "the copy"
    takes.clear()
    for step in range(100):  # in a second
        await life.report("r7", *digests(250 + step % 5, seed=7))
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.0)
    assert 9 <= len(takes) <= 11
    assert all(later[0] - earlier[0] >= TABLE_FLOOR_S - 1e-6 for earlier, later in itertools.pairwise(takes))
    assert copy.view.is_resident(digests(254, seed=7)[-1])
    takes.clear()
    await life.report("r8", *digests(256, seed=8))
    await asyncio.sleep(1.0)
    ((_, num_rows, num_bytes),) = takes
    assert num_rows == 1
    assert num_bytes <= 1000
    follower.cancel()
    await life.service.close()


@virtually
async def test_an_answer_is_as_long_as_the_question() -> None:
    life = Life()
    for index in range(200):
        await life.report(f"r{index}", *digests(100, seed=index))
    await life.settle()
    (cold,) = digests(1, seed=1000)
    assert len(pickle.dumps(await life.service.assign([cold]))) < 300
    await life.service.close()


@virtually
async def test_loads_are_told_apart_from_adapters_and_with_their_age() -> None:
    life = Life()
    heard: list[tuple[float, dict[str, ReplicaLoad | None], float]] = []
    loads = LoadTableClient(
        life.service.watch_loads, "ingress", lambda rows, sent_s: heard.append((now_s(), dict(rows), sent_s))
    )
    await life.report("r0", load=3)
    follower = asyncio.create_task(loads.follow())
    await asyncio.sleep(0.01)
    assert heard == [(0.0, {"r0": (3, 0.0)}, 0.0)]
    table_before = life.service._table._version
    for _ in range(10):
        await life.report("r0", load=4)
        await asyncio.sleep(0.05)
    assert life.service._table._version == table_before, "no adapter has moved"
    assert 2 <= len(heard) <= 4, f"every {LOADS_FLOOR_S} s"
    at_s, rows, sent_s = heard[1]
    load = rows["r0"]
    assert load is not None
    assert load[1] <= sent_s == at_s
    num_heard = len(heard)
    for _ in range(10):
        await life.report("r0", load=0)
        await asyncio.sleep(1.0)
    assert [rows["r0"] for _, rows, _ in heard[num_heard:]] == [(0, 0.51)], "once, however often it is reported"
    await life.report("r0", load=1)
    await asyncio.sleep(0.5)
    assert heard[-1][1] == {"r0": (1, now_s() - 0.5)}
    await life.report("r0", is_draining=True)
    await asyncio.sleep(0.5)
    assert heard[-1][1] == {"r0": None}
    follower.cancel()
    await life.service.close()


@virtually
async def test_one_ingress_that_reaches_nobody_changes_nothing_and_a_dead_replica_goes_soon() -> None:
    life = Life()
    for index in range(8):
        await life.report(f"r{index}")
    watchers = [PlacementTableClient(life.service.watch, f"ingress{index}") for index in range(3)]
    followers = [asyncio.create_task(watcher.follow()) for watcher in watchers]

    async def reports() -> None:
        while True:
            for index in range(1, 8):
                await life.report(f"r{index}")
            await asyncio.sleep(1.0)

    reporting = asyncio.create_task(reports())
    everybody = [f"r{index}" for index in range(8)]
    for _ in range(5):
        await life.service.report_unreachable("ingress0", everybody)
        await asyncio.sleep(1.0)
    assert [set(watcher.view.replicas) for watcher in watchers] == [set(everybody[1:])] * 3, "r0 is silent, too"
    for task in (reporting, *followers):
        task.cancel()
    await life.service.close()


@virtually
async def test_the_replica_that_was_started_last_says_how_placement_works() -> None:
    life = Life()
    await life.report("old")
    await asyncio.sleep(1.0)
    await life.report("new", settings=PlacementConfig(heartbeat_timeout_s=2.0, policy="least_loaded"))
    await asyncio.sleep(1.0)
    assert await life.service.assign(["digest"]) == {}, "a policy without homes"
    await asyncio.sleep(3.0)
    assert set((await life.watched()).view.replicas) == set(), "silent for longer than two seconds"
    await asyncio.sleep(1.0)
    await life.report("newest", settings=PlacementConfig(policy="there.is.none"))
    assert await life.service.assign(["digest"]) == {}, "what cannot be read is not taken over"
    await life.service.close()


@virtually
async def test_shares_come_from_the_store_that_the_replicas_work_with() -> None:
    stores = Stores(old={"heavy": 0.5, "other": 0.5}, new={"heavy": 1.0})
    life = Life(stores, PlacementConfig(heartbeat_timeout_s=1e6))

    async def num_homes(digest: str = "heavy") -> int:
        await asyncio.sleep(0.1)
        return len((await life.service.assign([digest]))[digest])

    for index in range(4):
        await life.report(f"r{index}", store="old")
    await life.settle()
    assert await num_homes() == 2
    stores.published["old"].publish({"heavy": 0.75})
    assert await num_homes() == 3
    await life.report("r4", store="new")
    assert stores.followed == ["old"], "there are replicas that work with it"
    for index in range(4):
        await life.report(f"r{index}", is_draining=True)
    for index in range(5, 8):
        await life.report(f"r{index}", store="new")
    assert await num_homes() == 4
    assert await num_homes("other") == 1, "the new store knows of no share of it"
    assert stores.followed == ["old", "new"]
    await life.service.close()


def test_messages_of_a_replica_are_as_long_as_what_has_changed() -> None:
    reporter = DeltaReporter(ReplicaIdentity("store", "{}", 0.0))
    names = digests(256)
    whole = reporter.next_delta(ReplicaReport("r0", resident=tuple(sorted(names[:255]))))
    assert (whole.is_whole, len(whole.loaded), whole.number) == (True, 255, 1)
    after = tuple(sorted([*names[1:255], names[255]]))
    change = reporter.next_delta(ReplicaReport("r0", 3, 1, resident=after, last_used_s={names[1]: 1.0}))
    assert change == ReplicaDelta("r0", 2, 4, loaded=(names[255],), unloaded=(names[0],), used_s={names[1]: 1.0})
    assert len(pickle.dumps(change)) < 800
    again = reporter.next_delta(ReplicaReport("r0", resident=after, last_used_s={names[1]: 1.0}))
    assert again == ReplicaDelta("r0", 3)


@virtually
async def test_a_replica_is_told_what_tenants_were_served_on_those_that_are_on_the_table() -> None:
    life = Life()
    for total in (0.0, 9.0):
        for replica_id in ("r0", "r1"):
            reporter = life.reporters.setdefault(replica_id, DeltaReporter(ReplicaIdentity("store", "{}", 0.0)))
            await life.service.report(reporter.next_delta(ReplicaReport(replica_id, served={"a": 1.0 + total})))
    assert await life.service.served_elsewhere("r0", ["a", "b"]) == {"a": 9.0, "b": 0.0}
    await life.report("r1", is_draining=True)
    assert await life.service.served_elsewhere("r0", ["a"]) == {"a": 0.0}
    await life.service.close()


@virtually
async def test_decisions_of_the_autoscaler_are_kept_once_and_the_newest_of_all_deployments() -> None:
    life = Life()
    up, down = (1.0, 1, 3, "pending tokens", 2.9), (3.0, 3, 1, "nothing to do", 0.0)
    await life.service.report_scaling("EngineReplica", [up])
    await life.service.report_scaling("EngineReplica-2", [(2.0, 0, 1, "waiting requests", 1.0)])
    await life.service.report_scaling("EngineReplica", [up, down])  # the policy repeats itself
    found = await life.service.scaling_decisions()
    assert [(each.deployment, each.before, each.target) for each in found] == [
        ("EngineReplica", 3, 1), ("EngineReplica-2", 0, 1), ("EngineReplica", 1, 3),
    ]  # fmt: skip
    assert pickle.loads(pickle.dumps(found)) == found
    await life.service.report_scaling(
        "EngineReplica", [(float(at), 1, 2, "KV blocks in use", 1.5) for at in range(9, 309)]
    )
    found = await life.service.scaling_decisions()
    assert [each.time_s for each in found] == [float(at) for at in range(308, 308 - MAX_SCALING_DECISIONS, -1)]


@virtually
async def test_an_ingress_knows_the_replicas_that_drain() -> None:
    life = Life()
    await life.report("r0")
    await life.report("r1", load=3)
    await life.report("r1", load=3, is_draining=True)
    copy = await life.watched()
    assert set(copy.view.replicas) == {"r0"}
    assert copy.view.draining == {"r1": DrainingReplica(now_s(), 3)}
    for _ in range(4):
        await asyncio.sleep(5.0)
        await life.report("r0")
        assert len(life.service._state.view.draining) == (now_s() <= 10.0), "gone once it is silent"
    await life.service.close()
