"""The ingress as a Serve deployment: HTTP requests and Python calls in, calls to engine replicas out.

A thin shell over `IngressService`: it connects to the other processes and follows the tables they publish.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from app.config import HTTP_HOST, AppConfig, usage_folder
from app.deployments.ingress import handle_api
from app.deployments.ingress.accounting import PricingContext, RequestAccounting, TenantTableClient
from app.deployments.ingress.base_models import BaseModels, names_in
from app.deployments.ingress.dispatch.replica_load import ReplicaLoadTracker
from app.deployments.ingress.dispatch.request_router import RequestRouter
from app.deployments.ingress.dispatch.stream import Stream
from app.deployments.ingress.handle_api import builtin_errors
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.base_router import BASE_MODEL
from app.deployments.ingress.http.batch_executor import answer_line
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.metrics import IngressMetrics
from app.deployments.ingress.preprocess.tokenizer_service import open_tokenizer_service
from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, CompletionRequest
from app.deployments.ingress.service import IngressService, Parts
from app.deployments.ingress.tracing import open_tracer
from app.deployments.object_storage.service import StorageService
from app.deployments.placement.actor import placement_service
from app.deployments.placement.messages import ScalingDecision
from app.deployments.placement.placer import LoadTableClient, PlacementTableClient, Placer
from app.deployments.placement.replica_choice import make_policy
from app.deployments.registry.feed.view import Entry, Key, RegistryView
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.gauges import repeat_gauges
from app.deployments.rpc.health_check import HealthCheck
from app.deployments.rpc.long_poll_client import LongPollClient, Watch
from app.deployments.rpc.long_poll_host import Changes
from app.deployments.rpc.metrics_agents import MetricsAgents
from app.deployments.rpc.named_actor import NamedActor
from app.deployments.rpc.ray_private import AsgiIngress, http_host, listen_on_loopback, route_in_this_loop
from app.deployments.rpc.serve_transport import ServeTransport
from app.deployments.store.actor import (
    storage_service,
    store_actor,
    store_service,
    store_settings,
    tenants_service,
    traffic_history,
)
from app.deployments.tenancy.metrics import RejectionCounters
from app.deployments.tenancy.usage.prices import Prices
from app.deployments.tenancy.usage.wal import open_wal
from app.logging import start_log


@serve.ingress()
class Ingress(AsgiIngress):
    """One HTTP ingress. Several may run; they share registries and placement and nothing else."""

    async def __init__(self, config_jsons: Sequence[str], engines: Sequence[DeploymentHandle[Any]]) -> None:  # type: ignore[misc]
        """The settings and engine replicas of each base model, in order."""
        configs = [AppConfig.model_validate_json(each) for each in config_jsons]
        config = configs[0]
        listen_on_loopback()
        context = serve.get_replica_context()
        ingress_id = context.replica_id.unique_id
        start_log(config.logs, f"ingress {ingress_id}")
        self._log_requests = config.logs.requests
        actor = store_actor(config)
        tenants_proxy = tenants_service(actor)
        tenants = TenantTableClient(tenants_proxy, ingress_id)
        holder = f"{ingress_id}-{uuid.uuid4().hex[:8]}"
        accounting = RequestAccounting(
            tenants.view, tenants_proxy, _pricing(config), holder, time.time, open_wal(usage_folder(config), holder)
        )
        common = _Common(
            ingress_id,
            context.app_name,
            holder,
            accounting,
            storage_service(actor),
            IngressMetrics(time.time),
            placement_service(config, context.app_name).scaling_decisions,
        )
        base_names = [each.model.name for each in configs]
        opened = [
            await _open_base(each, actor if each is config else store_actor(each), handle, common, base_names)
            for each, handle in zip(configs, engines, strict=True)
        ]
        self._bases = BaseModels([each.service for each in opened])
        self._service = self._bases.first
        host = os.environ.get(HTTP_HOST)
        if host is None:
            host = await asyncio.to_thread(http_host)
        self._rules = HttpPolicy.of(config.http, os.environ, host)
        self._tasks = Tasks()
        self._health = HealthCheck(self._tasks.check)
        self._tasks.run_forever(
            tenants.follow,
            accounting.keep_reporting_key_use,
            accounting.limiter.report_loop,
            accounting.usage_flusher.flush_loop,
            common.metrics.measure_loop_lag,
            partial(repeat_gauges, (*common.metrics.gauges, RejectionCounters(accounting.limiter))),
            *(work for each in opened for work in each.works),
        )
        for each in opened:
            await each.service.adapter_admin.store.preload(store_settings(each.config))
        for each in opened:
            await each.registry.complete.wait()  # otherwise the first requests would find no adapter
        await tenants.complete.wait()  # otherwise requests would pass without a key
        self._tasks.run_forever(self._service.batch_runner(answer_line(self._bases), holder).run)
        gc.freeze()  # what lives as long as the process is not looked through again, which would hold the loop

    def make_asgi_app(self) -> ASGIApp:
        return make_app(self._service, self._rules, log_requests=self._log_requests, others=self._bases.services[1:])

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply new limits without a restart. Serve's `user_config` holds the `limits` that differ from `args`."""
        for service in self._bases.services:
            service.reconfigure(user_config)

    async def check_health(self) -> None:
        await self._health.answer()

    # Calls through `serve.get_app_handle`. Errors are Python's own (`builtin_errors`).

    async def generate(
        self,
        text: str | list[str],
        sampling_params: dict[str, Any] | None = None,
        adapter: str | list[str | None] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """POST /generate: one result for one text, a list for a list."""
        with builtin_errors():
            return await handle_api.generate(self._serving({"lora_path": adapter}), text, sampling_params, adapter)

    async def stream(
        self, text: str, sampling_params: dict[str, Any] | None = None, adapter: str | None = None
    ) -> AsyncGenerator[str]:
        """Text of one answer, piece by piece (`handle.options(stream=True).stream.remote(...)`)."""
        with builtin_errors():
            async with aclosing(
                handle_api.stream(self._serving({"lora_path": adapter}), text, sampling_params, adapter)
            ) as pieces:
                async for piece in pieces:
                    yield piece

    async def chat(self, messages: list[dict[str, Any]], model: str | None = None, **fields: Any) -> dict[str, Any]:
        """POST /v1/chat/completions with these fields: its answer."""
        with builtin_errors():
            given = {"messages": messages, "model": model, **fields}
            return await handle_api.complete(self._serving(given), ChatCompletionRequest, given)

    async def complete(
        self, prompt: str | list[str] | list[int] | list[list[int]], model: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """POST /v1/completions with these fields: its answer."""
        with builtin_errors():
            given = {"prompt": prompt, "model": model, **fields}
            return await handle_api.complete(self._serving(given), CompletionRequest, given)

    async def stream_chat(
        self, messages: list[dict[str, Any]], model: str | None = None, **fields: Any
    ) -> AsyncGenerator[dict[str, Any]]:
        """The events of a streamed `chat` (`handle.options(stream=True).stream_chat.remote(...)`)."""
        with builtin_errors():
            given = {"messages": messages, "model": model, **fields}
            async with aclosing(handle_api.stream_events(self._serving(given), ChatCompletionRequest, given)) as events:
                async for event in events:
                    yield event

    async def stream_complete(
        self, prompt: str | list[str] | list[int] | list[list[int]], model: str | None = None, **fields: Any
    ) -> AsyncGenerator[dict[str, Any]]:
        """The events of a streamed `complete`."""
        with builtin_errors():
            given = {"prompt": prompt, "model": model, **fields}
            async with aclosing(handle_api.stream_events(self._serving(given), CompletionRequest, given)) as events:
                async for event in events:
                    yield event

    async def embed(
        self,
        text: str | list[str],
        adapter: str | None = None,
        pooling: str | None = None,
        dimensions: int | None = None,
    ) -> list[float] | list[list[float]]:
        """POST /v1/embeddings: one vector for one text, a list for a list."""
        with builtin_errors():
            return await handle_api.embed(self._serving({"lora_path": adapter}), text, adapter, pooling, dimensions)

    async def list_adapters(self) -> list[dict[str, Any]]:
        return [each for service in self._bases.services for each in handle_api.list_adapters(service)]

    async def load(self, name: str, path: str | None = None, **options: Any) -> dict[str, Any]:
        """POST /v1/loras with these options, and its `base_model`; waits for the load."""
        with builtin_errors():
            combine, base_name = options.get("combine") or {}, options.pop(BASE_MODEL, None)
            parts = names_in(combine.get("adapters"))
            service = self._bases.registering([name], base_name, handle_principal(), parts)
            return await handle_api.load(service, name, path, options)

    async def unload(self, name: str) -> dict[str, Any]:
        with builtin_errors():
            service = self._bases.having(name, handle_principal().tenant_id) or self._service
            return await handle_api.unload(service, name)

    async def replica_stats(self) -> list[dict[str, Any]]:
        """Counts of every engine replica, for tests and operators."""
        return [each for service in self._bases.services for each in await service.replica_stats()]

    async def __del__(self) -> None:
        await self._tasks.close()
        for service in reversed(self._bases.services):  # the first one closes what they have in common
            await service.close()

    def _serving(self, fields: Mapping[str, Any]) -> IngressService:
        return self._bases.of_body(fields, handle_principal())


class _Common(NamedTuple):
    """What the base models of an ingress have in common. `holder` is an id unique to this process."""

    ingress_id: str
    app_name: str
    holder: str
    accounting: RequestAccounting
    storage: StorageService
    metrics: IngressMetrics
    read_scaling: Callable[[], Coroutine[Any, Any, Sequence[ScalingDecision]]]


class _OpenBase(NamedTuple):
    """A base model's service, and the work that keeps it current."""

    config: AppConfig
    service: IngressService
    registry: RegistryMirror
    works: Sequence[Callable[[], Coroutine[Any, Any, None]]]


async def _open_base(
    config: AppConfig, actor: NamedActor, engines: DeploymentHandle[Any], common: _Common, base_names: Sequence[str]
) -> _OpenBase:
    """`actor`: its store. `base_names`: of all base models."""
    route_in_this_loop(engines)
    ingress_id, store, metrics = common.ingress_id, store_service(actor), common.metrics
    placement = placement_service(config, common.app_name)
    registry = RegistryMirror(store.watch, ingress_id, partial(metrics.adapters, config.model.name))
    placement_table = PlacementTableClient(placement.watch, ingress_id)
    loads = ReplicaLoadTracker(time.monotonic)
    is_first = config.tenants.base_uri is None
    parts = Parts(
        tokenizer=await asyncio.to_thread(open_tokenizer_service, config),
        registry=registry.view,
        accounting=common.accounting if is_first else common.accounting.for_base(_pricing(config)),
        store=store,
        storage=common.storage,
        traffic=traffic_history(actor),
        ingress_id=common.holder,
        placer=Placer(placement, placement_table, ingress_id),
        policy=make_policy(config.placement),
        loads=loads,
        replicas=ServeTransport(engines),
        make_batcher=ServeBatcher,
        metrics=metrics,
        metrics_agents=MetricsAgents(),
        clock=time.time,
        steady_clock=time.monotonic,
        read_scaling=common.read_scaling,
        tracer=open_tracer(os.environ, time.time),
    )
    service = IngressService(config, parts, base_names)
    works = (
        registry.follow,
        placement_table.follow,
        LoadTableClient(placement.watch_loads, ingress_id, loads.apply_reports).follow,
        service.adapter_admin.keep_resuming_unloads,
        service.adapter_metrics.keep_flushing,
        service.traffic.keep_reporting,
    )
    return _OpenBase(config, service, registry, works)


def _pricing(config: AppConfig) -> PricingContext:
    return PricingContext(Prices(config.tenants.prices, config.model.name), config.model.name)


class ServeBatcher:
    """`Batcher` over Serve's batching: streams that arrive within 2 ms are assigned together.

    A batch only assigns streams, which takes no time; no stream waits for another's tokens.
    """

    def __init__(self, router: RequestRouter) -> None:
        self._router = router

    async def assign(self, stream: Stream) -> None:
        await self._assign_together(stream)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002, max_concurrent_batches=8)
    async def _assign_together(self, streams: list[Stream]) -> list[None]:
        self._router.assign(streams)
        return [None for _ in streams]


class RegistryMirror(LongPollClient[Changes[Key, Entry]]):
    """A copy of the registry's table in `view`; it keeps its last state while the store is down.

    `complete` is set once the copy has caught up. `on_count` gets the number of adapters after each change.
    """

    def __init__(self, watch: Watch[Changes[Key, Entry]], watcher_id: str, on_count: Callable[[int], None]) -> None:
        super().__init__(watch, watcher_id)
        self._on_count = on_count
        self.view = RegistryView()
        self.complete = asyncio.Event()

    def _apply(self, update: Changes[Key, Entry]) -> None:
        self.view.take(update)
        self._on_count(self.view.num_adapters)
        if update.is_last:
            self.complete.set()
