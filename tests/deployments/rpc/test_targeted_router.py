"""Which replica a steered call reaches, and what still reaches one that Serve has taken off its list."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import ReplicaID

from app.deployments.rpc import targeted_router
from app.deployments.rpc.targeted_router import TargetedRouter
from app.deployments.rpc.transport import ReplicaLeaving, ReplicaUnreachable

DEPLOYMENT = DeploymentID("EngineReplica", "polylora")


def replica(unique_id: str) -> Any:
    async def queue_len(*_: Any, **__: Any) -> int:
        return 0

    return SimpleNamespace(replica_id=ReplicaID(unique_id, DEPLOYMENT), max_ongoing_requests=9, get_queue_len=queue_len)


def call(method: str, target_id: str | None) -> Any:
    kwargs = {} if target_id is None else {"target_replica_id": target_id}
    metadata = SimpleNamespace(call_method=method, internal_request_id="1", multiplexed_model_id="")
    return SimpleNamespace(args=[], kwargs=kwargs, metadata=metadata, created_at=0.0, future=asyncio.Future())


def router(*unique_ids: str) -> TargetedRouter:
    made = TargetedRouter(
        deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=False
    )
    made.update_replicas([replica(unique_id) for unique_id in unique_ids])
    return made


async def chosen(steered: TargetedRouter, method: str, target_id: str | None, *, is_retry: bool = False) -> str:
    found = await steered._choose_replica_for_request(call(method, target_id), is_retry=is_retry)
    return found.replica_id.unique_id


async def test_a_call_reaches_the_replica_that_it_names() -> None:
    steered = router("a", "b", "c")
    for method in ("submit", "frames", "abort"):
        assert [await chosen(steered, method, target_id) for target_id in "abc"] == ["a", "b", "c"]
    assert await chosen(steered, "stats", None) in {"a", "b", "c"}
    with pytest.raises(ReplicaUnreachable) as caught:
        await chosen(steered, "submit", "new")
    assert not isinstance(caught.value, ReplicaLeaving), "it may be announced yet"


async def test_a_replica_that_is_named_is_not_asked_for_its_load_first() -> None:
    """It may be far away, or cut off: then its caller gives up, and the router asks no more."""
    steered = router("a", "b")
    for each in steered.running:
        each.get_queue_len = asyncio.Event().wait  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        assert await chosen(steered, "submit", "a") == "a"


@pytest.mark.parametrize("left", [["b"], []], ids=["another runs", "none runs"])
async def test_what_ends_work_reaches_a_replica_that_drains(left: list[str]) -> None:
    steered = router("a", "b")
    steered.update_replicas([replica(unique_id) for unique_id in left])
    assert await chosen(steered, "abort", "a") == "a"
    assert await chosen(steered, "unload_adapter", "a") == "a"
    for method in ("submit", "frames", "stats"):
        with pytest.raises(ReplicaLeaving):
            await chosen(steered, method, "a")
    with pytest.raises(ReplicaLeaving):
        await chosen(steered, "abort", "a", is_retry=True)  # it was not taken there: not again and again
    steered.on_replica_actor_died(ReplicaID("a", DEPLOYMENT))
    with pytest.raises(ReplicaUnreachable):
        await chosen(steered, "abort", "a")


async def test_replicas_that_left_are_remembered_in_bounds_and_may_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targeted_router, "MAX_REMOVED", 2)
    steered = router("a", "b", "c")
    for listed in (["b", "c"], ["c"], [], ["b"]):
        steered.update_replicas([replica(unique_id) for unique_id in listed])
    assert list(steered._removed) == ["c"]
    assert await chosen(steered, "submit", "b") == "b"
