"""What replicas say about themselves, and what every ingress is told: values, without rules.

In: nothing. Out: a replica's state, the messages in which it tells of changes, and the rows of the published tables.
All of them are frozen: a new fact is a new value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.deployments.rpc.long_poll_host import Changes
from app.engine.wire_format import message


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica knows of itself. `active` counts requests in the engine by adapter digest.

    `last_used_s`: when a request last entered with each of the resident (Unix time); absent if none did. `num_rows`:
    rank rows that each of the resident takes; `num_rank_rows`: those that the replica has; `num_kv_tokens`: tokens that
    its KV memory holds. `cached_prefixes`: names of what prompts began with that is cached (`prefix_key`).
    `served`: what its fair queue has counted of each tenant.
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
    """What a replica was started with: its store's name, placement's settings (JSON), and when (Unix time)."""

    store: str
    settings: str
    started_s: float


@message
@dataclass(frozen=True, slots=True)
class ReplicaDelta:
    """What a replica sends: its load, and what has changed since its message with the number before.

    A message that `is_whole` stands alone: `loaded` is all that is resident, and it has an `origin`. `is_leaving`: the
    replica takes no new requests, for good. `num_rows` are the rank rows of what is `loaded`, `num_rank_rows` those
    that the replica has, `num_kv_tokens` what its KV memory holds, as far as it says so. `cached_prefixes` are new ones,
    or all in a whole message, `dropped_heads` are cached no more or were not used lately; 8 bytes each. `served`: the
    totals of tenants that were served since, in the fair queue's prices by weight; not of all if they are many.
    """

    replica_id: str
    number: int
    load: int = 0
    is_whole: bool = False
    is_leaving: bool = False
    loaded: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()
    active: Mapping[str, int] = field(default_factory=dict)
    used_s: Mapping[str, float] = field(default_factory=dict)
    origin: ReplicaIdentity | None = None
    num_rows: Mapping[str, int] = field(default_factory=dict)
    num_rank_rows: int = 0
    num_kv_tokens: int = 0
    cached_prefixes: tuple[bytes, ...] = ()
    dropped_heads: tuple[bytes, ...] = ()
    served: Mapping[str, float] = field(default_factory=dict)


#: ("replica", id) -> (started, rank rows, KV tokens): it is on the table. started: when it was (Unix time).
#: ("home", digest) -> the replicas that serve the adapter, those that were started first coming first.
#: ("resident", digest, id) -> (rank rows,): the adapter is on the replica's device.
#: ("heads", id) -> names in hexadecimal digits: what prompts began with that the replica has cached.
#: Numbers are written out.
Key = tuple[str, ...]
Row = tuple[str, ...]


#: Requests that a replica has, running and waiting, and when it said so, by placement's clock.
ReplicaLoad = tuple[int, float]


@message
class LoadDelta(NamedTuple):
    """Changes of the table of loads, by replica, and placement's time when they were sent."""

    changes: Changes[str, ReplicaLoad]
    now_s: float


@message
class Residency(NamedTuple):
    """An adapter on one replica: requests that use it, and when one last began to (Unix time)."""

    replica_id: str
    num_requests: int
    last_used_s: float | None
