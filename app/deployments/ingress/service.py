"""The ingress without Serve: everything its HTTP routes and Python calls use.

The deployment builds the parts; nothing here knows how they reach other processes. A request goes down through
preprocessor, dispatcher, batcher, router and connections.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from app.config import AppConfig, LimitsConfig
from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.adapter_admin import AdapterAdmin
from app.deployments.ingress.adapter_metrics import AdapterMetrics
from app.deployments.ingress.batches.batch_file import ARCHIVED, KEY_REVOKED
from app.deployments.ingress.batches.runner import WRITE_S, AnswerLine, BatchRunner
from app.deployments.ingress.dispatch.cold_start_limiter import ColdStartLimiter
from app.deployments.ingress.dispatch.dispatcher import Batcher, Dispatcher
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.dispatch.replica_connections import ReplicaConnections
from app.deployments.ingress.dispatch.replica_load import ReplicaLoadTracker
from app.deployments.ingress.dispatch.request_router import PrefixHasher, RequestRouter
from app.deployments.ingress.embeddings import Embedder
from app.deployments.ingress.error_responses import TABLE, ClientGone, LastReplica, ReplicaDraining
from app.deployments.ingress.metrics import IngressMetrics
from app.deployments.ingress.overview import ServiceOverview, without_adapter_names
from app.deployments.ingress.preprocess.adapter_directory import AdapterDirectory
from app.deployments.ingress.preprocess.adapter_resolution import AdapterResolver
from app.deployments.ingress.preprocess.lazy_adapter_loader import LazyAdapterLoader
from app.deployments.ingress.preprocess.preprocessor import RequestPreprocessor
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService
from app.deployments.ingress.principal import Principal, batch_principal
from app.deployments.ingress.scoring import Scorer
from app.deployments.ingress.semantic_router.embedders import BaseEmbedder, EncoderEmbedder
from app.deployments.ingress.semantic_router.router import SemanticRouter, TextEmbedder
from app.deployments.ingress.serializers.loras import record_body
from app.deployments.ingress.tracing import RequestTracer
from app.deployments.ingress.traffic_reporter import TrafficReporter
from app.deployments.object_storage.models import Batch
from app.deployments.object_storage.service import StorageService
from app.deployments.placement.messages import ScalingDecision
from app.deployments.placement.placer import Placer
from app.deployments.placement.policy import PlacementPolicy
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.models import DEFAULT_TENANT, Event
from app.deployments.rpc.metrics_agents import MetricsAgents
from app.deployments.rpc.transport import ReplicaClient, ReplicaGone, ReplicaUnreachable
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.deployments.tenancy.models import RateLimit, TenantLimits
from app.deployments.tenancy.usage.traffic_history import TrafficHistory
from app.engine.errors import NotFound, NotReady
from app.version import version

#: `status` looks for failures among the newest `MAX_EVENTS` events and lists `MAX_FAILURES`.
MAX_EVENTS, MAX_FAILURES = 200, 10
#: Routes that ask whether the service is ready.
PROBES = frozenset({"health", "readyz", "livez"})


class Parts(NamedTuple):
    """What the service is built from. `make_batcher` decides how streams are gathered before they are routed.
    `ingress_id` is an id unique to this process. `read_scaling` gives the autoscaling policy's decisions, newest first.

    `clock` gives Unix time, `steady_clock` seconds that never go back.
    """

    tokenizer: TokenizerService
    registry: RegistryView
    accounting: RequestAccounting
    store: StoreService[SharedAdapter]
    storage: StorageService
    traffic: TrafficHistory
    ingress_id: str
    placer: Placer
    policy: PlacementPolicy
    loads: ReplicaLoadTracker
    replicas: ReplicaClient
    make_batcher: Callable[[RequestRouter], Batcher]
    metrics: IngressMetrics
    metrics_agents: MetricsAgents
    clock: Callable[[], float]
    steady_clock: Callable[[], float]
    read_scaling: Callable[[], Coroutine[Any, Any, Sequence[ScalingDecision]]]
    tracer: RequestTracer | None = None


class IngressService:
    """One per ingress process and base model, on its event loop."""

    def __init__(self, config: AppConfig, parts: Parts, base_names: Sequence[str] = ()) -> None:
        """`base_names`: of all base models of this ingress."""
        self._config = config
        self.base_names = tuple(base_names) or (config.model.name,)
        self.placer = parts.placer
        self._replicas = parts.replicas
        self._metrics = parts.metrics
        self.metrics_agents = parts.metrics_agents
        self.tracer = parts.tracer
        self.base_name = config.model.name
        self.new_project_limits = _new_project_limits(config, self.base_names)
        self.adapters_config = config.adapters
        self.model_config = config.model
        self.registry = parts.registry
        self.accounting = parts.accounting
        self._connections = ReplicaConnections(parts.replicas, parts.placer, parts.loads)
        self._request_router = RequestRouter(
            self._connections, parts.placer, parts.policy, parts.steady_clock, random.Random(),
            config.limits.replica_timeout_s, PrefixHasher(parts.tokenizer.spec.digest, config.engine.block_size).of,
        )  # fmt: skip
        self._cold = ColdStartLimiter(parts.placer, config.limits)
        count = parts.accounting.usage_recorder.record_usage
        dispatcher = Dispatcher(parts.make_batcher(self._request_router), self._connections, self._cold, count)
        self._directory = AdapterDirectory(parts.registry, parts.placer, parts.store, parts.steady_clock)
        self._lazy_loader = LazyAdapterLoader(
            parts.registry, parts.store, config.limits, has_resolvers=bool(config.adapters.resolvers)
        )
        wait_s = config.limits.adapter_load_timeout_s
        embedder: TextEmbedder = BaseEmbedder(self.base_name, parts.tokenizer, dispatcher, wait_s, parts.clock)
        if config.semantic_router.embedder != "base":
            embedder = EncoderEmbedder(config.semantic_router.embedder)
        self._router = SemanticRouter(config.semantic_router, parts.registry, embedder, wait_s, parts.accounting)
        self.preprocessor = RequestPreprocessor(
            parts.tokenizer,
            self.base_name,
            self._directory,
            AdapterResolver(
                self.base_name,
                parts.tokenizer.spec.digest,
                parts.registry,
                self._directory,
                self._lazy_loader,
                parts.accounting.tenant,
            ),
            dispatcher,
            config.limits,
            parts.accounting,
            parts.clock,
            self._router,
            lambda: parts.placer.view.num_kv_tokens,
        )
        self.embedder = Embedder(self.preprocessor, dispatcher, parts.accounting, parts.clock)
        self.scorer = Scorer(self.embedder, self.preprocessor, parts.clock)
        self.adapter_admin = AdapterAdmin(parts.store, parts.replicas, parts.placer)
        self.adapter_metrics = AdapterMetrics(parts.accounting.tenants_service)
        self.storage, self.storage_config = parts.storage, config.storage
        self.traffic = TrafficReporter(parts.traffic, parts.ingress_id, self._connections, parts.placer, parts.clock)
        self.overview = ServiceOverview(
            config, parts.registry, parts.placer, self._connections, parts.replicas, parts.store, self.traffic,
            parts.read_scaling, parts.clock, parts.steady_clock,
        )  # fmt: skip
        self._batch_runner: BatchRunner | None = None

    @property
    def exact_base_name(self) -> str:
        """The base's name with its version: it means the base also while an alias has the base's name."""
        return f"{self.base_name}@{self.preprocessor.tokenizer.spec.digest[:12]}"

    def batch_runner(self, answer: AnswerLine, holder: str, write_s: float = WRITE_S) -> BatchRunner:
        """The runner of batch jobs in this ingress, to be started with `run`; `answer` computes one request. `holder`:
        this process."""
        self._batch_runner = BatchRunner(
            self.storage, answer, self._caller_of, holder, self._config, self.accounting.clock, write_s
        )
        return self._batch_runner

    def wake_batches(self) -> None:
        """Look for a new batch now."""
        if self._batch_runner is not None:
            self._batch_runner.wake()

    def _caller_of(self, batch: Batch) -> Principal | tuple[str, str]:
        """The caller of a batch's requests, or why it may send no more."""
        tenant = self.accounting.tenant(batch.tenant_id)
        if tenant is None or tenant.archived_s is not None:
            return ARCHIVED
        key = self.accounting.view.key(batch.key_id)
        if batch.key_id and (key is None or key.role == "management" or not key.is_valid(self.accounting.clock())):
            return KEY_REVOKED
        return batch_principal(tenant, batch.key_id, batch.id)

    def reconfigure(self, changes: dict[str, Any]) -> None:
        """Apply new limits without a restart: those that differ from the configuration's. Raises ValueError."""
        limits = LimitsConfig.model_validate(self._config.limits.model_dump() | changes)
        self.preprocessor.limits = self._cold.limits = self._lazy_loader.limits = limits
        self._request_router.replica_timeout_s = limits.replica_timeout_s

    def is_ready(self) -> bool:
        """Whether any replica is usable."""
        return bool(self._connections.usable)

    @property
    def may_sleep(self) -> bool:
        """Whether requests are accepted without replicas, because the first one starts a replica."""
        return self._config.http.ready_at_zero_replicas

    def observe(self, route: str, status: int, task: GenerationTask | None) -> None:
        """Count a finished request; `task` is None if it failed before it had sequences."""
        if route not in PROBES:  # refused while the service starts
            self.traffic.record(task, status)
        if task is not None:
            self.accounting.end(task, is_cut=status == TABLE[ClientGone].status)
            self.adapter_metrics.record(task, status)
            if self.tracer is not None:
                self.tracer.record(task)
        first = task.requests[0] if task is not None else None
        self._metrics.request(
            route,
            status,
            arrival_s=first.arrival_s if first is not None else None,
            first_s=task.progress.first_s if task is not None else None,
            is_adapter=first is not None and first.requested_adapter is not None,
            usages=task.usages if task is not None else [],
        )

    async def replica_stats(self) -> list[dict[str, Any]]:
        """Counts of every replica that answers, for tests and operators."""
        replica_ids = sorted(self.placer.view.replicas)
        results = await asyncio.gather(*map(self._replicas.stats, replica_ids), return_exceptions=True)
        return [result for result in results if isinstance(result, dict)]

    def has_replica(self, replica_id: str) -> bool:
        """Whether this base model has such a replica, running or draining."""
        return replica_id in self.placer.view.replicas or replica_id in self.placer.view.draining

    async def drain_replica(self, replica_id: str, who: str, *, force: bool) -> None:
        """Have a replica end its requests, take no new ones and be replaced. `force`: also if no other could take them.

        Raises NotFound, ReplicaDraining, LastReplica, and NotReady if the replica or the audit log cannot be reached.
        """
        if not self.has_replica(replica_id):
            raise NotFound(f"there is no engine replica {replica_id[:80]!r}; GET /v1/overview lists them")
        draining = ReplicaDraining(
            f"replica {replica_id} drains already; Ray Serve stops it when its requests have ended"
        )
        if replica_id in self.placer.view.draining:
            raise draining
        if not force and not self._connections.usable.keys() - {replica_id}:
            raise LastReplica(
                f"replica {replica_id} is the only one that takes requests: they would wait, and be refused after "
                "limits.replica_timeout_s, until another has started; use force=true to drain it nevertheless"
            )
        await self.adapter_admin.store.record_audit(who, "drain replica", replica_id, tenant_id=DEFAULT_TENANT)
        try:
            is_new = await self._replicas.drain(replica_id)
        except (ReplicaGone, ReplicaUnreachable) as error:
            raise NotReady(
                f"replica {replica_id} cannot be reached ({error}); placement removes it if it stays so"
            ) from error
        if not is_new:
            raise draining

    async def status(self, caller: Principal) -> dict[str, Any]:
        """State of the service for operators: replicas, store tiers, recent failures. Raises NotReady.

        A project does not see numbers of all tenants.
        """
        summary = {"object": "status", "version": version(), "model": self.base_name, "is_ready": self.is_ready()}
        if caller.kind == "project":
            return summary
        store, tenant_id = self.adapter_admin.store, caller.tenant_id
        num_elsewhere, scaling, replicas, tiers, events = await asyncio.gather(
            self.traffic.num_open_elsewhere(),
            self.overview.scaling_decisions(),
            self.replica_stats(),
            store.stats(),
            store.events(None, limit=MAX_EVENTS, before=None, tenant_id=tenant_id),
        )
        return summary | {
            "num_adapters": self.registry.num_adapters,
            "num_open_requests": self._connections.num_streams + num_elsewhere,
            "replicas": [without_adapter_names(replica) for replica in replicas],
            "scaling_decisions": scaling,
            "tiers": tiers,
            "failures": [record_body(event) for event in _failures(events)[:MAX_FAILURES]],
        }

    async def close(self) -> None:
        """Stop background work; open streams are left to their callers."""
        if self._batch_runner is not None:
            await self._batch_runner.close()
        clients = (self.adapter_admin, self._router, self._lazy_loader, self._directory)
        reporters = (self.adapter_metrics, self.traffic, self.accounting)
        for part in (*clients, self._request_router, self._connections, *reporters):
            await part.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)


def _failures(events: Sequence[Event]) -> list[Event]:
    """The failures among events, newest first, but for names that were removed since."""
    removed, found = set[str](), []
    for event in events:
        if event.event == "removed":
            removed.add(event.name)
        elif event.event.startswith("failed") and event.name not in removed:
            found.append(event)
    return found


def _new_project_limits(config: AppConfig, base_names: Sequence[str]) -> TenantLimits:
    given = config.tenants.default_limits
    rate = RateLimit(given.requests_per_min, given.tokens_per_min)
    return TenantLimits(
        rates=dict.fromkeys(base_names, rate) if rate != RateLimit() else {},
        max_concurrent=given.max_concurrent,
        max_adapters=given.max_adapters,
        calls_per_min=given.calls_per_min,
    )
