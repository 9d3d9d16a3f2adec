"""Placement after a restart: the last tables stand until the new one has every replica."""

from __future__ import annotations

import asyncio

import pytest

from app.config import AppConfig, PlacementConfig
from app.deployments.placement import actor as actors
from app.deployments.placement.actor import PlacementActor
from app.deployments.placement.table import ReplicaReport
from app.engine.errors import NotReady


def new_life() -> PlacementActor:
    return PlacementActor(AppConfig(placement=PlacementConfig(report_interval_s=0.3)).model_dump_json())


async def test_a_restart_replaces_no_table_by_half_a_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "SETTLE_MARGIN_S", 0.0)
    before = new_life()
    held, _ = await before.watch(None, "ingress", 60.0) or pytest.fail("no news")
    after = new_life()
    watching = asyncio.create_task(after.watch(held, "ingress", 60.0))
    await after.report(ReplicaReport("r0"))
    with pytest.raises(NotReady):
        await after.assign(["digest"])
    _, first = await after.watch(None, "an ingress without a table", 60.0) or pytest.fail("no news")
    assert set(first.replicas) == {"r0"}, "it has nothing better"
    await asyncio.sleep(0.1)
    assert not watching.done()
    await after.report(ReplicaReport("r1", resident=("digest",)))
    _, table = await watching or pytest.fail("no news")
    assert set(table.replicas) == {"r0", "r1"}
    _, table = await after.assign(["digest"])
    assert table.homes == {"digest": ("r1",)}
