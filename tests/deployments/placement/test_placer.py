"""Placement that does not answer costs no request: the last table stands."""

from __future__ import annotations

import pytest

from app.deployments.placement.messages import Key, Row
from app.deployments.placement.placer import PlacementTableClient, Placer
from app.deployments.placement.service import PlacementService
from app.deployments.rpc.actor_proxy import actor_proxy
from app.deployments.rpc.long_poll_host import Changes, Version
from app.engine.errors import NotReady
from tests.deployments.scripted_actor import LOST, Scripted, raised


async def unused(*_: object) -> tuple[Version, Changes[Key, Row]] | None:
    raise AssertionError("nobody follows")


def placer_over(*answers: object) -> Placer:
    placer = Placer(actor_proxy(PlacementService, Scripted(*answers)), PlacementTableClient(unused, "me"), "me")  # type: ignore[arg-type]
    placer.view.apply({("replica", "r0"): ("0.0", "0", "0"), ("assigned", "known"): ("r0",)})
    return placer


async def test_placement_that_has_just_started_leaves_the_last_table() -> None:
    placer = placer_over(raised(NotReady("just started")))
    await placer.assign(["digest"])
    assert (placer.view.assigned_replicas("known"), placer.view.assigned_replicas("digest")) == (("r0",), ())


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
async def test_placement_that_is_lost_costs_no_request(error: Exception) -> None:
    placer = placer_over(error, error)
    await placer.assign(["digest"])
    await placer.report_unreachable(["replica"])
    assert placer.view.assigned_replicas("known") == ("r0",)


def test_what_every_replica_holds_is_the_least_that_any_says() -> None:
    view = placer_over().view
    assert view.num_kv_tokens == 0, "the only one has no such memory"
    view.apply({("replica", "r1"): ("0.0", "64", "4096"), ("replica", "r2"): ("0.0", "64", "1024")})
    view.apply({("replica", "r3"): ("0.0", "64", "0")})
    assert view.num_kv_tokens == 1024
    view.apply({("replica", "r2"): None})
    assert view.num_kv_tokens == 4096


async def test_an_answer_counts_until_the_table_says_something_else() -> None:
    placer = placer_over({"asked": ("r1",), "known": ("r9",)})
    await placer.assign(["asked", "known"])
    view = placer.view
    assert (view.assigned_replicas("asked"), view.assigned_replicas("known")) == (("r1",), ("r0",)), (
        "the table's own rows are newer"
    )
    view.apply({("assigned", "asked"): ("r2",)})
    assert view.assigned_replicas("asked") == ("r2",)
    view.apply({("assigned", "asked"): None})
    assert view.assigned_replicas("asked") == ()
