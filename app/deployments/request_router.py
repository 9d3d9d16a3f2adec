"""Which replica a call reaches: exactly the one the caller names.

In: Serve's pending request; the keyword argument `target_replica_id` names a replica. Out: that replica,
or `ReplicaUnreachable` when this process does not know it (not announced yet, draining, dead). A call
that names nobody goes to the less loaded of two random replicas. Where adapters live is placement's
decision; this module only obeys it.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from app.deployments.transport import ReplicaUnreachable

TARGET_KEYWORD = "target_replica_id"


class SteeredRouter(RequestRouter):
    """Steers by `target_replica_id`. Stock routing matches replicas to requests by a key that all calls
    made inside one parent request share, so concurrent steered calls would swap targets: hence the override
    of `_choose_replica_for_request`, as in Ray's own capacity-queue router."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        target_id = pending_request.kwargs.get(TARGET_KEYWORD) if pending_request is not None else None
        if target_id is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == target_id:
                return [[replica]]
        raise ReplicaUnreachable(f"replica {target_id} is not among the {len(candidate_replicas)} running ones")

    async def _choose_replica_for_request(
        self,
        pending_request: PendingRequest,
        *,
        is_retry: bool = False,  # noqa: ARG002  Ray's signature
    ) -> RunningReplica:
        attempt = 0
        while True:
            while not self._replicas:
                if pending_request.kwargs.get(TARGET_KEYWORD) is not None:
                    raise ReplicaUnreachable("no replica is running")
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            for candidates in await self.choose_replicas(list(self._replicas.values()), pending_request):
                replica = await self._select_from_candidate_replicas(candidates, attempt)
                if replica is not None:
                    self._record_queue_wait_time(pending_request)
                    return replica
            await self._backoff(attempt)
            attempt += 1
