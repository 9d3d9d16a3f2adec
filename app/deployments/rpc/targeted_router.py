"""A call reaches exactly the replica that its caller names.

In: Serve's pending request, whose keyword argument `target_replica_id` names a replica. Out: that replica, or
`ReplicaUnreachable` when this process does not know it (not announced yet, draining, dead). A call that names no
replica goes to the less loaded of two random ones. A replica that drains gets nothing new, but calls that end work
there (`abort`) still reach it. Placement decides where adapters live; this module only obeys.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from app.deployments.rpc.ray_private import ChoosingRouter
from app.deployments.rpc.transport import ReplicaLeaving, ReplicaUnreachable

TARGET_KEYWORD = "target_replica_id"
#: Calls that reach a replica while it drains: they end work instead of bringing any.
ENDING_METHODS = frozenset({"abort", "unload_adapter"})
#: Replicas that are remembered after Serve has taken them off the list, the last that left.
MAX_LEFT = 64


class TargetedRouter(ChoosingRouter):
    """Steers by `target_replica_id`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._left: dict[str, RunningReplica] = {}  # by unique id, in the order in which they left

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list: running replicas, not those that drain. Whoever leaves it is remembered until it dies."""
        before = {replica.replica_id.unique_id: replica for replica in self.running}
        super().update_replicas(replicas)
        self._left |= before
        for replica in replicas:
            self._left.pop(replica.replica_id.unique_id, None)
        while len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._left.pop(replica_id.unique_id, None)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        target_id = pending_request.kwargs.get(TARGET_KEYWORD) if pending_request is not None else None
        if target_id is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == target_id:
                return [[replica]]
        raise self._no_way_to(target_id)

    def shortcut(self, request: PendingRequest, *, is_retry: bool) -> RunningReplica | None:
        """A call that ends work reaches a replica that has left the list, but is not tried there again."""
        if is_retry or request.metadata.call_method not in ENDING_METHODS:
            return None
        return self._left.get(request.kwargs.get(TARGET_KEYWORD, ""))

    def check_can_wait(self, request: PendingRequest) -> None:
        target_id = request.kwargs.get(TARGET_KEYWORD)
        if target_id is not None:
            raise self._no_way_to(target_id)

    def _no_way_to(self, target_id: str) -> ReplicaUnreachable:
        kind = ReplicaLeaving if target_id in self._left else ReplicaUnreachable
        return kind(f"replica {target_id} is not among the {len(self.running)} running ones")
