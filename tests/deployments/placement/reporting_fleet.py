"""Replicas that report to placement's books, as a test says."""

from __future__ import annotations

import random

from app.config import PlacementConfig
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaReport
from app.deployments.placement.policy import PlacementPolicy
from app.deployments.placement.replica_choice import make_policy
from app.deployments.placement.state import PlacementState
from tests.deployments.placed import ORIGIN

STICKY = make_policy(PlacementConfig())
LEAST_LOADED = make_policy(PlacementConfig(policy="least_loaded"))


class ReportingFleet(PlacementState):
    """Books of a fleet whose replicas are called r0, r1, …; each tells of its changes as real ones do."""

    def __init__(self, num_replicas: int = 0, policy: PlacementPolicy = STICKY) -> None:
        super().__init__(policy, heartbeat_timeout_s=10, report_interval_s=1)
        self.reporters: dict[str, DeltaReporter] = {}
        for index in range(num_replicas):
            self.hear(ReplicaReport(f"r{index}"), 0.0)

    def hear(self, report: ReplicaReport, now_s: float, *, is_draining: bool = False) -> bool:
        """A replica says how it is, wholly if it is asked to. Returns whether it had to be asked."""
        reporter = self.reporters.setdefault(report.replica_id, DeltaReporter(ORIGIN))
        if self.report(reporter.next_delta(report, is_draining=is_draining), now_s):
            return False
        reporter.reset()
        assert self.report(reporter.next_delta(report, is_draining=is_draining), now_s)
        return True

    def leave(self, replica_id: str, now_s: float = 0.0) -> None:
        """A replica says that it leaves."""
        self.hear(ReplicaReport(replica_id), now_s, is_draining=True)

    @property
    def replicas(self) -> list[str]:
        return sorted(self.view.replicas)

    @property
    def homes(self) -> dict[str, tuple[str, ...]]:
        """All adapters' homes."""
        digests = {digest for replica_id in self.replicas for digest in self.view.assigned_adapters(replica_id)}
        return {digest: self.view.assigned_replicas(digest) for digest in digests}


def digests(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{rng.getrandbits(128):032x}" for _ in range(count)]
