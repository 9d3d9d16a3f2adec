"""The policy without affinity, to compare others with: any replica may serve any adapter.

In: a digest and the table. Out: no homes, which means anywhere; the least loaded replica gets the request.
"""

from __future__ import annotations

from app.deployments.placement.table import PlacementTable


class LeastLoadedPolicy:
    """Adapters are ignored: every request goes to the replica with the least work."""

    has_homes = False

    def homes(self, digest: str, table: PlacementTable) -> tuple[str, ...]:  # noqa: ARG002
        return ()
