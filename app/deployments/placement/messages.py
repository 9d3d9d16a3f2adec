"""Messages between replicas, placement and ingresses, and the rows of the published tables. All are immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.deployments.rpc.long_poll_host import Changes
from app.engine.wire_format import message


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The state of a replica. `active` counts requests in the engine by adapter digest.

    `last_used_s`: when a request last started with each resident adapter (Unix time); absent if none did. `num_rows`:
    rank rows of each resident adapter; `num_rank_rows`: rows that the replica has; `num_kv_tokens`: tokens that its KV
    memory holds. `cached_prefixes`: hashes of the prompt prefixes in its cache (`prefix_key`). `served`: what its fair
    queue has counted per tenant.
    """

    replica_id: str
    num_running: int = 0
    num_waiting: int = 0
    resident: tuple[str, ...] = ()
    active: Mapping[str, int] = field(default_factory=dict)
    last_used_s: Mapping[str, float] = field(default_factory=dict)
    num_rows: Mapping[str, int] = field(default_factory=dict)
    num_rank_rows: int = 0
    num_kv_tokens: int = 0
    cached_prefixes: tuple[bytes, ...] = ()
    served: Mapping[str, float] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return self.num_running + self.num_waiting


@message
@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """What a replica was started with: its store's name, placement's settings (JSON), and the time (Unix)."""

    store: str
    settings: str
    started_s: float


@message
@dataclass(frozen=True, slots=True)
class ReplicaDelta:
    """A replica's load, and what has changed since the message with the number before.

    With `is_whole` it is a full report: `loaded` is everything resident, and it has the `identity`. `is_draining`: the
    replica takes no new requests, for good. `num_rows` are the rank rows of `loaded`. `cached_prefixes` are the new
    ones, or all of them in a full report; `dropped_prefixes` are no longer cached or were not used lately; 8 bytes
    each. `served`: totals of the tenants that were served since, in the fair queue's prices by weight; not all of them
    if they are many.
    """

    replica_id: str
    number: int
    load: int = 0
    is_whole: bool = False
    is_draining: bool = False
    loaded: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()
    active: Mapping[str, int] = field(default_factory=dict)
    used_s: Mapping[str, float] = field(default_factory=dict)
    identity: ReplicaIdentity | None = None
    num_rows: Mapping[str, int] = field(default_factory=dict)
    num_rank_rows: int = 0
    num_kv_tokens: int = 0
    cached_prefixes: tuple[bytes, ...] = ()
    dropped_prefixes: tuple[bytes, ...] = ()
    served: Mapping[str, float] = field(default_factory=dict)


#: ("replica", id) -> (start time (Unix), rank rows, KV tokens), of each live replica
#: ("assigned", digest) -> the replicas that serve the adapter, the oldest first
#: ("resident", digest, id) -> (rank rows,): the adapter is on the replica's device
#: ("draining", id) -> the fields of a `DrainingReplica`
#: ("prefixes", id) -> hexadecimal hashes of the prompt prefixes that the replica has cached
#: Numbers are strings.
Key = tuple[str, ...]
Row = tuple[str, ...]


class DrainingReplica(NamedTuple):
    """A replica that takes no new requests. `started_s`: Unix time, 0 if unknown; `num_requests`: those that it has."""

    started_s: float
    num_requests: int


#: Requests that a replica has, running and waiting, and when it reported them, by placement's clock.
ReplicaLoad = tuple[int, float]


@message
class LoadDelta(NamedTuple):
    """Changes of the table of loads, by replica, and placement's time when they were sent."""

    changes: Changes[str, ReplicaLoad]
    now_s: float


@message
class Residency(NamedTuple):
    """An adapter on one replica: requests that use it, and when one last started with it (Unix time)."""

    replica_id: str
    num_requests: int
    last_used_s: float | None


@message
class ScalingDecision(NamedTuple):
    """A change of a deployment's number of replicas that the autoscaling policy wanted, at a time (Unix).

    `needed`: how many replicas the signal `reason` needs, not rounded. Serve acts after its own delays.
    """

    deployment: str
    time_s: float
    before: int
    target: int
    reason: str
    needed: float
