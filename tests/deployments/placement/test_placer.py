"""Placement that does not answer costs no request: the last table stands."""

from __future__ import annotations

import pytest

from app.deployments.links.published import Version
from app.deployments.links.watched import Watched
from app.deployments.placement.client import PlacementClient
from app.deployments.placement.placer import ServePlacer
from app.engine.errors import NotReady
from tests.deployments.scripted_actor import LOST, Scripted, raised


async def unused(*_: object) -> tuple[Version, str] | None:
    raise AssertionError("nobody follows")


async def test_placement_that_has_just_started_leaves_the_last_table() -> None:
    watched: Watched[str] = Watched(unused, "me", "the last table")
    await ServePlacer(PlacementClient(Scripted(raised(NotReady("just started"))), "store"), watched).assign(["digest"])  # type: ignore[arg-type]
    assert watched.value == "the last table"


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_placement_that_is_lost_costs_no_request(error: Exception) -> None:
    watched: Watched[str] = Watched(unused, "me", "the last table")
    placer = ServePlacer(PlacementClient(Scripted(error, error), "store"), watched)  # type: ignore[arg-type]
    await placer.assign(["digest"])
    await placer.gone("replica")
    assert watched.value == "the last table"
