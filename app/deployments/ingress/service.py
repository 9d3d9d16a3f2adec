"""What an ingress is, without Serve: everything that its HTTP routes and Python callers use.

The deployment opens the parts; nothing here knows how they reach other processes. A request goes straight down from
here: frontend, dispatcher, batcher, assigner, links.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from app.config import AppConfig, LimitsConfig
from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.adapter_admin import AdapterAdmin
from app.deployments.ingress.adapter_metrics import AdapterMetrics
from app.deployments.ingress.batches.runner import WRITE_S, AnswerLine, BatchRunner
from app.deployments.ingress.dispatch.cold_start_limiter import ColdStartLimiter
from app.deployments.ingress.dispatch.dispatcher import Batcher, Dispatcher
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.dispatch.replica_connections import ReplicaConnections
from app.deployments.ingress.dispatch.replica_load import ReplicaLoadTracker
from app.deployments.ingress.dispatch.request_router import PrefixHasher, RequestRouter
from app.deployments.ingress.embeddings import Embedder
from app.deployments.ingress.error_responses import TABLE, ClientGone
from app.deployments.ingress.metrics import IngressMetrics
from app.deployments.ingress.preprocess.adapter_directory import AdapterDirectory
from app.deployments.ingress.preprocess.adapter_resolution import AdapterResolver
from app.deployments.ingress.preprocess.lazy_adapter_loader import LazyAdapterLoader
from app.deployments.ingress.preprocess.preprocessor import RequestPreprocessor
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService
from app.deployments.ingress.principal import Principal, batch_principal
from app.deployments.ingress.semantic_router.embedders import BaseEmbedder, EncoderEmbedder
from app.deployments.ingress.semantic_router.router import Router, TextEmbedder
from app.deployments.ingress.semantic_router.selection import AdapterSelector
from app.deployments.ingress.serializers.loras import record_body
from app.deployments.object_storage.models import Batch
from app.deployments.object_storage.service import StorageService
from app.deployments.placement.placer import Placer
from app.deployments.placement.policy import PlacementPolicy
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.models import DEFAULT_TENANT
from app.deployments.rpc.transport import ReplicaClient
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.deployments.tenancy.models import PUBLIC
from app.version import version

#: `status` looks for failures among so many events, and tells so many of them.
MAX_EVENTS, MAX_FAILURES = 200, 10


class Parts(NamedTuple):
    """What the service works with. `make_batcher` says how streams are gathered before they are given to replicas.

    `clock` gives Unix time, `steady_clock` seconds that never go back; `loads` is told what replicas report.
    """

    text: TokenizerService
    registry: RegistryView
    tenancy: RequestAccounting
    store: StoreService[SharedAdapter]
    storage: StorageService
    placer: Placer
    policy: PlacementPolicy
    loads: ReplicaLoadTracker
    replicas: ReplicaClient
    make_batcher: Callable[[RequestRouter], Batcher]
    metrics: IngressMetrics
    clock: Callable[[], float]
    steady_clock: Callable[[], float]


class IngressService:
    """One per ingress process, on its event loop."""

    def __init__(self, config: AppConfig, parts: Parts) -> None:
        self._config = config
        self._placer = parts.placer
        self._replicas = parts.replicas
        self._metrics = parts.metrics
        self.base_name = config.model.name
        self.registry = parts.registry
        self.tenancy = parts.tenancy
        self._links = ReplicaConnections(parts.replicas, parts.placer, parts.loads)
        self._assigner = RequestRouter(
            self._links, parts.placer, parts.policy, parts.steady_clock, random.Random(), config.limits.replica_timeout_s,
            PrefixHasher(parts.text.spec.digest, config.engine.block_size).of,
        )  # fmt: skip
        self._cold = ColdStartLimiter(parts.placer, config.limits)
        count = parts.tenancy.counting.record_usage
        dispatcher = Dispatcher(parts.make_batcher(self._assigner), self._links, self._cold, count)
        self._names = AdapterDirectory(parts.registry, parts.placer, parts.store, parts.steady_clock)
        self._lazy_loader = LazyAdapterLoader(
            parts.registry, parts.store, config.limits, has_resolvers=bool(config.adapters.resolvers)
        )
        wait_s = config.limits.adapter_load_timeout_s
        embedder: TextEmbedder = BaseEmbedder(self.base_name, parts.text, dispatcher, wait_s, parts.clock)
        if config.semantic_router.embedder is not None:
            embedder = EncoderEmbedder(config.semantic_router.embedder)
        self._router = Router(config.semantic_router, parts.registry, embedder, wait_s)
        self.frontend = RequestPreprocessor(
            parts.text,
            self.base_name,
            self._names,
            AdapterResolver(self.base_name, parts.registry, self._names, self._lazy_loader),
            dispatcher,
            config.limits,
            parts.tenancy,
            parts.clock,
            AdapterSelector(self._router, parts.tenancy),
            lambda: parts.placer.view.num_kv_tokens,
        )
        self.embedder = Embedder(self.frontend, dispatcher, parts.tenancy, parts.clock)
        self.management = AdapterAdmin(parts.store, parts.replicas, parts.placer)
        self.activity = AdapterMetrics(parts.tenancy.owner)
        self.storage, self.storage_config = parts.storage, config.storage
        self._batches: BatchRunner | None = None

    def batch_runner(self, answer: AnswerLine, holder: str, write_s: float = WRITE_S) -> BatchRunner:
        """Works on batches here from now on, once `run`; `answer` computes one request. `holder`: this process."""
        self._batches = BatchRunner(
            self.storage, answer, self._caller_of, holder, self._config, self.tenancy.clock, write_s
        )
        return self._batches

    def wake_batches(self) -> None:
        """There is a new batch."""
        if self._batches is not None:
            self._batches.wake()

    def _caller_of(self, batch: Batch) -> Principal | None:
        """Whose a batch's requests are; None once its project is archived."""
        tenant = PUBLIC if batch.tenant_id == DEFAULT_TENANT else self.tenancy.view.tenant(batch.tenant_id)
        if tenant is None or tenant.archived_s is not None:
            return None
        return batch_principal(tenant, batch.key_id, batch.id)

    def reconfigure(self, changes: dict[str, Any]) -> None:
        """Take new limits without a restart: those that differ from the configuration's. Raises ValueError."""
        limits = LimitsConfig.model_validate(self._config.limits.model_dump() | changes)
        self.frontend.limits = self._cold.limits = self._lazy_loader.limits = limits
        self._assigner.replica_timeout_s = limits.replica_timeout_s

    def is_ready(self) -> bool:
        """Whether any replica can be used."""
        return bool(self._links.usable)

    @property
    def may_sleep(self) -> bool:
        """Whether requests are taken while there is no replica, because the first has one started."""
        return self._config.http.ready_at_zero_replicas

    def observe(self, route: str, status: int, job: GenerationTask | None) -> None:
        """Count a request that has ended; it has no job if it ended before it had sequences."""
        if job is not None:
            self.tenancy.end(job, is_cut=status == TABLE[ClientGone].status)
            self.activity.ended(job, status)
        first = job.requests[0] if job is not None else None
        self._metrics.request(
            route,
            status,
            arrival_s=first.arrival_s if first is not None else None,
            first_s=job.progress.first_s if job is not None else None,
            is_adapter=first is not None and first.asked_for is not None,
            usages=job.usages if job is not None else [],
        )

    async def replica_stats(self) -> list[dict[str, Any]]:
        """Counts of every replica on the table that answers: for tests and operators."""
        replica_ids = sorted(self._placer.view.replicas)
        results = await asyncio.gather(*map(self._replicas.stats, replica_ids), return_exceptions=True)
        return [result for result in results if isinstance(result, dict)]

    async def status(self, caller: Principal) -> dict[str, Any]:
        """How the service is, for operators: replicas, tiers of the store, and what failed lately. Raises NotReady.

        Numbers of all tenants' adapters and requests are not told to one of them.
        """
        about = {"object": "status", "version": version(), "model": self.base_name, "is_ready": self.is_ready()}
        if caller.kind == "project":
            return about
        store, tenant_id = self.management.store, caller.tenant_id
        replicas, tiers, events = await asyncio.gather(
            self.replica_stats(),
            store.stats(),
            store.events(None, limit=MAX_EVENTS, before=None, tenant_id=tenant_id),
        )
        return about | {
            "num_adapters": self.registry.num_adapters,
            "num_open_requests": self._links.num_streams,
            "replicas": [_told(replica) for replica in replicas],
            "tiers": tiers,
            "failures": [record_body(event) for event in events if event.event.startswith("failed")][:MAX_FAILURES],
        }

    async def close(self) -> None:
        """End what goes on in the background; streams that are still open are left to their callers."""
        if self._batches is not None:
            await self._batches.close()
        asking = (self.management, self._router, self._lazy_loader, self._names)
        for part in (*asking, self._assigner, self._links, self.activity, self.tenancy):
            await part.close()


def _told(replica: dict[str, Any]) -> dict[str, Any]:
    """A replica's counts; of its adapters how many, not which."""
    return {name: len(value) if isinstance(value, tuple) else value for name, value in replica.items()}
