"""What the console's first page shows of the service: this ingress's copies of the registry and of the placement
table, and what other processes know.

Counts of replicas and tiers, the last hour's traffic and a tenant's last events are read from other processes. That
happens while a page is open, at most once per `STATS_AGE_S` for all pages of this ingress that ask for the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from app.config import AppConfig
from app.deployments.ingress.dispatch.replica_connections import ReplicaConnections
from app.deployments.ingress.principal import Principal, visible_events
from app.deployments.ingress.serializers.loras import record_body
from app.deployments.ingress.traffic_reporter import TrafficReporter
from app.deployments.placement.messages import ScalingDecision
from app.deployments.placement.placer import Placer
from app.deployments.registry.feed.view import Entry, Key, RegistryView
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.transport import ReplicaClient
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.deployments.tenancy.usage.traffic_history import BUCKET_S
from app.engine.errors import ModelNotFound, NotReady
from app.version import version

#: Counts of replicas and tiers are at most this old.
STATS_AGE_S = BUCKET_S - 1.0
#: A replica that has not answered after this long has no counts in this answer.
STATS_TIMEOUT_S = 2.0
#: The newest events of an overview.
MAX_EVENTS = 20
#: The newest autoscaling decisions of an overview; the status has more.
MAX_DECISIONS = 20
#: Adapters between two turns of the event loop.
_TURN = 500
_COLUMNS = ("name", "tenant", "digest", "max_rank", "rows", "size_bytes", "pinned", "host", "resident", "assigned")


class ServiceOverview:
    """One per ingress, on its event loop. `clock` gives Unix time, `steady_clock` seconds that never go back."""

    def __init__(
        self,
        config: AppConfig,
        registry: RegistryView,
        placer: Placer,
        connections: ReplicaConnections,
        replicas: ReplicaClient,
        store: StoreService[SharedAdapter],
        traffic: TrafficReporter,
        read_scaling: Callable[[], Coroutine[Any, Any, Sequence[ScalingDecision]]],
        clock: Callable[[], float],
        steady_clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._base_name, self._policy = config.model.name, config.placement.policy
        self._registry = registry
        self._placer = placer
        self._connections = connections
        self._replicas = replicas
        self._store = store
        self._clock, self._steady_clock = clock, steady_clock
        self._traffic = traffic
        self._read_scaling = read_scaling
        self._num_changes: Counter[str] = Counter()
        self._reads = SharedReads(steady_clock)
        registry.follow(self._note_change)

    async def body(self, caller: Principal, since_s: int) -> dict[str, Any]:
        """The overview for a caller, with the samples after `since_s`. Raises NotReady while the store restarts."""
        is_project = caller.kind == "project"
        tenant_id = caller.tenant_id if is_project else None
        body = {
            "object": "overview",
            "time": int(self._clock()),
            "since": since_s,
            "interval_s": BUCKET_S,
            "version": version(),
            "model": self._base_name,
            "is_ready": bool(self._connections.usable),
            "changes": self._num_changes[caller.tenant_id],
            "num_adapters": len(self._registry.adapter_names(caller.tenant_id)),
            "samples": await self._reads.get(
                ("samples", tenant_id, since_s), lambda: self._traffic.history.series(since_s, tenant_id)
            ),
            "events": await self._reads.get(
                ("events", caller.tenant_id, is_project),
                lambda: self._read_events(caller.tenant_id, visible_events(caller)),
            ),
        }
        if is_project:
            return body
        stats, tiers = await self._reads.get("stats", self._read_stats)
        num_elsewhere = await self._reads.get("open", self._traffic.num_open_elsewhere)
        view = self._placer.view
        return body | {
            "num_adapters": self._registry.num_adapters,
            "num_open_requests": self._connections.num_streams + num_elsewhere,
            "replicas": [
                self._replica_body(replica_id)
                | {
                    "state": "running" if replica_id in self._connections.usable else "unreachable",
                    "stats": stats.get(replica_id),
                }
                for replica_id in sorted(view.replicas)
            ]
            + [
                {
                    "id": replica_id,
                    "started": int(replica.started_s),
                    "num_requests": replica.num_requests,
                    "num_rank_rows": 0,
                    "num_assigned": 0,
                    "state": "draining",
                    "stats": None,
                }
                for replica_id, replica in sorted(view.draining.items())
            ],
            "scaling_decisions": await self.scaling_decisions(MAX_DECISIONS),
            "tiers": tiers,
            "policy": self._policy,
        }

    async def scaling_decisions(self, limit: int | None = None) -> list[dict[str, Any]] | None:
        """The autoscaling policy's decisions for all engine deployments, newest first; None while placement is down."""
        try:
            decisions = await self._reads.get("scaling", self._read_scaling)
        except NotReady:
            return None
        return [
            {
                "deployment": each.deployment,
                "created": int(each.time_s),
                "prev_num_replicas": each.before,
                "target_num_replicas": each.target,
                "reason": each.reason,
                "needed_replicas": each.needed,
            }
            for each in decisions[:limit]
        ]

    def settings(self) -> list[dict[str, Any]]:
        """Every setting of the service by its dotted name. Settings have no secrets."""
        return [*_settings(self._config, "")]

    async def residency(self, name: str | None, tenant_id: str) -> dict[str, Any]:
        """Which replica has which adapter. `name`: only this adapter of the tenant. Raises NotFound, NotReady."""
        view, host = self._placer.view, set(await self._store.host_digests())
        replica_ids = sorted(view.replicas)
        indexes = {replica_id: index for index, replica_id in enumerate(replica_ids)}
        tenants: dict[str, int] = {}
        rows: list[tuple[Any, ...]] = []
        keys = self._registry.adapter_keys() if name is None else [(tenant_id, name)]
        for number, (owner_id, each) in enumerate(keys):
            if number % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            entry = self._registry.adapter(each, owner_id)
            if entry is not None:
                digest = entry.ref.digest
                resident = sorted(indexes[place] for place in view.resident_replicas(digest) if place in indexes)
                assigned = [indexes[place] for place in view.assigned_replicas(digest) if place in indexes]
                tenant = tenants.setdefault(owner_id, len(tenants))
                rows.append((
                    each, tenant, digest[:12], entry.max_rank, view.num_rows(digest), entry.size_bytes, entry.pinned,
                    digest in host, resident, assigned,
                ))  # fmt: skip
        if name is not None and not rows:
            raise ModelNotFound(f"there is no adapter {name[:80]!r}; GET /v1/loras lists them")
        body: dict[str, Any] = {
            "object": "residency",
            "time": int(self._clock()),
            "policy": self._policy,
            "replicas": [self._replica_body(replica_id) for replica_id in replica_ids],
            "tenants": [*tenants],
            "adapters": {column: [row[index] for row in rows] for index, column in enumerate(_COLUMNS)},
        }
        if name is not None:
            entry = self._registry.adapter(name, tenant_id)
            digest = entry.ref.digest if entry is not None else ""
            body["preference"] = [indexes[each] for each in view.preference_order(digest) if each in indexes]
        return body

    def _replica_body(self, replica_id: str) -> dict[str, Any]:
        view = self._placer.view
        return {
            "id": replica_id,
            "started": int(view.started_s(replica_id)),
            "num_requests": self._connections.loads.num_requests(replica_id),
            "num_rank_rows": view.num_rank_rows(replica_id),
            "num_assigned": view.num_assigned_to(replica_id),
        }

    async def _read_events(self, tenant_id: str, only: frozenset[str] | None) -> list[dict[str, Any]]:
        events = await self._store.events(None, limit=MAX_EVENTS, before=None, tenant_id=tenant_id, only=only)
        return [record_body(event) for event in events]

    async def _read_stats(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Counts by replica, and by tier of the store."""
        replica_ids = sorted(self._placer.view.replicas)
        calls = (asyncio.wait_for(self._replicas.stats(each), STATS_TIMEOUT_S) for each in replica_ids)
        tiers, *found = await asyncio.gather(self._store.stats(), *calls, return_exceptions=True)
        if isinstance(tiers, BaseException):
            raise tiers
        stats = {
            replica_id: without_adapter_names(each)
            for replica_id, each in zip(replica_ids, found, strict=True)
            if isinstance(each, dict)
        }
        return stats, tiers

    def _note_change(self, key: Key, entry: Entry | None) -> None:  # noqa: ARG002
        self._num_changes[key[0]] += 1


class SharedReads:
    """What was read from other processes in the last `STATS_AGE_S`: everyone who asks meanwhile shares one call.

    One event loop. `steady_clock` gives seconds that never go back.
    """

    def __init__(self, steady_clock: Callable[[], float]) -> None:
        self._steady_clock = steady_clock
        self._tasks = Tasks()
        self._found: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def get(self, key: Hashable, read: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What `read` returned for this key, or returns now. Raises what it raises; that is not kept."""
        now_s = self._steady_clock()
        found = self._found.get(key)
        if found is None or now_s - found[0] > STATS_AGE_S or (found[1].done() and found[1].exception()):
            self._found = {each: old for each, old in self._found.items() if now_s - old[0] <= STATS_AGE_S}
            found = self._found[key] = (now_s, self._tasks.start(read()))
        return await asyncio.shield(found[1])


def _settings(settings: BaseModel, prefix: str) -> Iterator[dict[str, Any]]:
    values = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name not in values:  # of a device that is not this one
            continue
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{prefix}{name}.")
            continue
        default = to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}))
        is_required = default is PydanticUndefined
        yield {
            "id": f"{prefix}{name}",
            "value": values[name],
            "default": None if is_required else default,
            "is_set": is_required or values[name] != default,
            "description": field.description or "",
        }


def without_adapter_names(replica: dict[str, Any]) -> dict[str, Any]:
    """A replica's counts, with the number of its adapters instead of their digests."""
    return {name: len(value) if isinstance(value, tuple) else value for name, value in replica.items()}
