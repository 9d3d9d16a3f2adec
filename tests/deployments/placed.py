"""Where adapters are, as a test says it: placement's books without an actor."""

from __future__ import annotations

from app.config import PlacementConfig
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaIdentity, ReplicaReport, Residency
from app.deployments.placement.replica_choice import make_policy
from app.deployments.placement.state import PlacementState
from app.deployments.placement.view import PlacementView

ORIGIN = ReplicaIdentity("store", PlacementConfig().model_dump_json(), 0.0)


class Placed:
    """A placement state that replicas have reported to: each its resident digests, by its id."""

    def __init__(self, **resident: tuple[str, ...]) -> None:
        self.books = PlacementState(make_policy(PlacementConfig()), heartbeat_timeout_s=10, report_interval_s=1)
        for replica_id, digests in resident.items():
            assert self.books.report(DeltaReporter(ORIGIN).next_delta(ReplicaReport(replica_id, resident=digests)), 0.0)

    @property
    def view(self) -> PlacementView:
        return self.books.view

    async def residency(self, digest: str) -> list[Residency]:
        return self.books.residency(digest)
