"""Placement after a restart: the last tables stand until the new one has every replica."""

from __future__ import annotations

import asyncio

import pytest

from app.config import PlacementConfig
from app.deployments.links.published import Published
from app.deployments.links.watched import Watch
from app.deployments.placement import service as service_module
from app.deployments.placement.service import PlacementService
from app.deployments.placement.table import ReplicaReport
from app.deployments.registry.shares import Shares
from app.engine.errors import NotReady


class Stores:
    """The shares of stores by name, and who follows which."""

    def __init__(self, **shares: Shares) -> None:
        self.published = {name: Published(value) for name, value in shares.items()}
        self.followed: list[str] = []

    def watch(self, name: str) -> Watch[Shares]:
        self.followed.append(name)
        return self.published[name].newer


def new_life(stores: Stores | None = None) -> PlacementService:
    config = PlacementConfig(report_interval_s=0.3)
    return PlacementService(config, (stores or Stores(store={})).watch, lambda: None)


async def test_a_restart_replaces_no_table_by_half_a_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SETTLE_MARGIN_S", 0.0)
    before = new_life()
    held, _ = await before.watch(None, "ingress", 60.0) or pytest.fail("no news")
    after = new_life()
    watching = asyncio.create_task(after.watch(held, "ingress", 60.0))
    await after.report(ReplicaReport("r0"), "store")
    with pytest.raises(NotReady):
        await after.assign(["digest"])
    _, first = await after.watch(None, "an ingress without a table", 60.0) or pytest.fail("no news")
    assert set(first.replicas) == {"r0"}, "it has nothing better"
    await asyncio.sleep(0.1)
    assert not watching.done()
    await after.report(ReplicaReport("r1", resident=("digest",)), "store")
    _, table = await watching or pytest.fail("no news")
    assert set(table.replicas) == {"r0", "r1"}
    _, table = await after.assign(["digest"])
    assert table.homes == {"digest": ("r1",)}
    await before.close()
    await after.close()


async def test_shares_come_from_the_store_that_the_replicas_work_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "SETTLE_MARGIN_S", -1.0)
    monkeypatch.setattr(service_module, "REBALANCE_INTERVAL_S", 0.01)
    stores = Stores(old={"heavy": 0.5}, new={"heavy": 1.0})
    placement = new_life(stores)

    async def num_homes(number: int) -> None:
        async with asyncio.timeout(600):
            while len((await placement.assign(["heavy"]))[1].homes.get("heavy", ())) != number:
                await asyncio.sleep(0.002)

    for index in range(4):
        await placement.report(ReplicaReport(f"r{index}"), "old")
    await num_homes(2)
    stores.published["old"].publish({"heavy": 0.75})
    await num_homes(3)
    await placement.report(ReplicaReport("r4"), "new")
    assert stores.followed == ["old"], "there are replicas that work with it"
    for index in range(4):
        await placement.gone(f"r{index}")
    for index in range(5, 8):
        await placement.report(ReplicaReport(f"r{index}"), "new")
    await num_homes(4)
    assert stores.followed == ["old", "new"]
    await placement.close()
