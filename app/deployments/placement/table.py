"""What replicas say about themselves, and what every ingress holds: values, without rules.

In: nothing. Out: `ReplicaReport`, which a replica sends, and `PlacementTable`, which the placement actor publishes.
Both are frozen: a new fact is a new value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.engine.message import message


@message
@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says about itself. `active` counts requests in the engine by adapter digest.

    `last_used_s`: when a request last entered with each of the resident (Unix time); absent if none did.
    """

    replica_id: str
    num_running: int = 0
    num_waiting: int = 0
    resident: tuple[str, ...] = ()
    active: Mapping[str, int] = field(default_factory=dict)
    last_used_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return self.num_running + self.num_waiting


@message
@dataclass(frozen=True, slots=True)
class PlacementTable:
    """What the ingresses hold. `homes` maps an adapter digest to the replicas that serve it, oldest first."""

    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_resident(self, digest: str) -> bool:
        """Whether the adapter was on any replica's device when it last said so."""
        return any(digest in report.resident for report in self.replicas.values())
