"""Serve router that sends a call exactly to the replica that its caller names (`target_replica_id`).

Raises `ReplicaUnreachable` if this process does not know the replica (not announced yet, draining, dead). A call
without a target goes to the less loaded of two random replicas. A draining replica gets no new work, but calls that end
work (`abort`) still reach it. Placement decides where adapters live.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from app.deployments.rpc.ray_private import ChoosingRouter
from app.deployments.rpc.transport import ReplicaLeaving, ReplicaUnreachable

TARGET_KEYWORD = "target_replica_id"
#: Methods that end work; they also reach a draining replica.
ENDING_METHODS = frozenset({"abort", "unload_adapter"})
#: Replicas that are remembered after Serve has removed them from its list, the most recent.
MAX_REMOVED = 64


class TargetedRouter(ChoosingRouter):
    """Routes by `target_replica_id`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._removed: dict[str, RunningReplica] = {}  # unique id -> replica, oldest first

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Serve's list of running replicas. Those that leave it are remembered until they die."""
        before = {replica.replica_id.unique_id: replica for replica in self.running}
        super().update_replicas(replicas)
        self._removed |= before
        for replica in replicas:
            self._removed.pop(replica.replica_id.unique_id, None)
        while len(self._removed) > MAX_REMOVED:
            del self._removed[next(iter(self._removed))]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._removed.pop(replica_id.unique_id, None)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        target_id = pending_request.kwargs.get(TARGET_KEYWORD) if pending_request is not None else None
        if target_id is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == target_id:
                return [[replica]]
        raise self._unreachable(target_id)

    def shortcut(self, request: PendingRequest, *, is_retry: bool) -> RunningReplica | None:
        """A removed replica, for a call that ends work; it is not retried there."""
        if is_retry or request.metadata.call_method not in ENDING_METHODS:
            return None
        return self._removed.get(request.kwargs.get(TARGET_KEYWORD, ""))

    def check_can_wait(self, request: PendingRequest) -> None:
        target_id = request.kwargs.get(TARGET_KEYWORD)
        if target_id is not None:
            raise self._unreachable(target_id)

    def _unreachable(self, target_id: str) -> ReplicaUnreachable:
        kind = ReplicaLeaving if target_id in self._removed else ReplicaUnreachable
        return kind(f"replica {target_id} is not among the {len(self.running)} running replicas")
