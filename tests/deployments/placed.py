"""Where adapters are, as a test says it: placement's books without an actor."""

from __future__ import annotations

from app.config import PlacementConfig
from app.deployments.placement.books import PlacementBooks
from app.deployments.placement.choosing import make_policy
from app.deployments.placement.table import Origin, ReplicaReport, Residency
from app.deployments.placement.telling import Telling
from app.deployments.placement.view import PlacementView

ORIGIN = Origin("store", PlacementConfig().model_dump_json(), 0.0)


class Placed:
    """`ingress.management.PlacedAdapters` over books that replicas have reported to, each what is given by its id."""

    def __init__(self, **resident: tuple[str, ...]) -> None:
        self.books = PlacementBooks(make_policy(PlacementConfig()), silence_s=10, report_interval_s=1)
        for replica_id, digests in resident.items():
            assert self.books.report(Telling(ORIGIN).news(ReplicaReport(replica_id, resident=digests)), 0.0)

    @property
    def view(self) -> PlacementView:
        return self.books.view

    async def residency(self, digest: str) -> list[Residency]:
        return self.books.residency(digest)
