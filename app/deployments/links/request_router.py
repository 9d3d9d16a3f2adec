"""Which replica a call reaches: exactly the one the caller names.

In: Serve's pending request; the keyword argument `target_replica_id` names a replica. Out: that replica,
or `ReplicaUnreachable` when this process does not know it (not announced yet, draining, dead). A call
that names nobody goes to the less loaded of two random replicas. A replica that drains gets nothing new, but
what ends work there (`abort`) still reaches it. Where adapters live is placement's decision; this module only obeys it.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.deployments.links.transport import ReplicaLeaving, ReplicaUnreachable

TARGET_KEYWORD = "target_replica_id"
#: Calls that reach a replica while it drains: they end work instead of bringing any.
ENDING_METHODS = frozenset({"abort", "drop_adapter"})
#: Replicas that are remembered after Serve has taken them off the list, the last that left.
MAX_LEFT = 64


class SteeredRouter(RequestRouter):
    """Steers by `target_replica_id`. Stock routing matches replicas to requests by a key that all calls
    made inside one parent request share, so concurrent steered calls would swap targets: hence the override
    of `_choose_replica_for_request`, as in Ray's own capacity-queue router."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._left: dict[str, RunningReplica] = {}  # by unique id, in the order in which they left

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list: running replicas, not those that drain. Whoever leaves it is remembered until it dies."""
        before = {replica.replica_id.unique_id: replica for replica in self._replicas.values()}
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

    async def _choose_replica_for_request(
        self,
        pending_request: PendingRequest,
        *,
        is_retry: bool = False,
    ) -> RunningReplica:
        target_id = pending_request.kwargs.get(TARGET_KEYWORD)
        if target_id in self._left and pending_request.metadata.call_method in ENDING_METHODS and not is_retry:
            return self._left[target_id]
        attempt = 0
        while True:
            while not self._replicas:
                if target_id is not None:
                    raise self._no_way_to(target_id)
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            for candidates in await self.choose_replicas(list(self._replicas.values()), pending_request):
                replica = await self._select_from_candidate_replicas(candidates, attempt)
                if replica is not None:
                    self._record_queue_wait_time(pending_request)
                    return replica
            await self._backoff(attempt)
            attempt += 1

    def _no_way_to(self, target_id: str) -> ReplicaUnreachable:
        kind = ReplicaLeaving if target_id in self._left else ReplicaUnreachable
        return kind(f"replica {target_id} is not among the {len(self._replicas)} running ones")
