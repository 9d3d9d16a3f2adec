"""The ingress deployment: HTTP and Python callers in, engine replicas out.

In: HTTP requests, and calls of other Ray jobs through the deployment handle. Out: answers. A thin shell:
words are `frontend`, placement and streams are `dispatch`, routes are `http_app`. This class only wires
them to Ray and owns what must live as long as the process: the watchers of both tables.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from app.config import AppConfig, LimitsConfig
from app.deployments.ingress import python_calls
from app.deployments.ingress.assigner import Assigner
from app.deployments.ingress.batcher import ServeBatcher
from app.deployments.ingress.dispatcher import Dispatcher
from app.deployments.ingress.frontend import Frontend, Job
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.management_bodies import adapter_body, unloaded_body
from app.deployments.ingress.links import Links
from app.deployments.ingress.management import Management
from app.deployments.ingress.metrics import IngressMetrics
from app.deployments.ingress.tenants import handle_caller
from app.deployments.ingress.text_model import open_text
from app.deployments.ingress.watching import WatchedRegistry
from app.deployments.links.gauges import repeat_gauges
from app.deployments.links.placement_client import PlacementClient
from app.deployments.links.ray_private import AsgiIngress, route_in_this_loop
from app.deployments.links.serve_transport import ServeTransport
from app.deployments.links.store_client import StoreClient
from app.deployments.links.watched import Watched
from app.deployments.placement.actor import placement_actor
from app.deployments.placement.placer import ServePlacer
from app.deployments.placement.policies.choosing import make_policy
from app.deployments.placement.table import PlacementTable
from app.deployments.registry.entries import CatalogEntry, LoadRequest
from app.deployments.registry.view import RegistryView
from app.deployments.store.actor import store_actor
from app.engine.adapters.card import AdapterRef
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)


@serve.ingress()
class Ingress(AsgiIngress):
    """One HTTP door. Several may run; they share the registry and placement, and nothing else."""

    async def __init__(self, config_json: str, engines: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        config = AppConfig.model_validate_json(config_json)
        self._config = config
        self.base_name = config.model.name
        context = serve.get_replica_context()
        ingress_id = context.replica_id.unique_id
        self._store = StoreClient(store_actor(config))
        placement = PlacementClient(placement_actor(config, context.app_name))
        self._metrics = IngressMetrics()
        self._registry = WatchedRegistry(self._store.watch, ingress_id, self._count_adapters)
        placed = Watched(placement.watch, ingress_id, PlacementTable())
        route_in_this_loop(engines)
        self._transport = ServeTransport(engines)
        self._placer = ServePlacer(placement, placed)
        clock = asyncio.get_running_loop().time
        policy, wait_s = make_policy(config.placement), config.limits.replica_wait_s
        links = Links(self._transport, self._placer, clock)
        self._assigner = Assigner(links, self._placer, policy, clock, wait_s)
        self._dispatcher = Dispatcher(ServeBatcher(self._assigner), links)
        self.management = Management(self._store, self._transport, lambda: self._placer.table)
        self._expected: set[str] = set()  # digests of adapters that the store was told to read
        text = await asyncio.to_thread(open_text, config)
        self.frontend = Frontend(text, self.base_name, self._resolve, self._dispatcher.stream, config.limits)
        loop = asyncio.get_running_loop()
        self._watchers = [
            loop.create_task(work, context=contextvars.Context())
            for work in (
                self._registry.follow(),
                placed.follow(),
                repeat_gauges(self._metrics.gauges),
                self.management.keep_taking_up(),
            )
        ]
        await self._store.preload()
        await self._registry.complete.wait()  # or the first requests would find no adapter

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """New limits without a restart: Serve's `user_config` holds the `limits` that differ from `args`."""
        limits = LimitsConfig.model_validate(self._config.limits.model_dump() | user_config)
        self.frontend.limits = limits
        self._assigner.replica_wait_s = limits.replica_wait_s

    def check_health(self) -> None:
        for watcher in self._watchers:
            if watcher.done():
                raise RuntimeError("the ingress no longer follows its tables") from watcher.exception()

    # -- Python callers (`serve.get_app_handle`) ------------------------------------------------------

    async def generate(
        self,
        text: str | list[str],
        sampling_params: dict[str, Any] | None = None,
        adapter: str | list[str | None] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """As POST /generate: one result for one text, a list for a list."""
        return await python_calls.generate(self, text, sampling_params, adapter)

    async def stream(
        self, text: str, sampling_params: dict[str, Any] | None = None, adapter: str | None = None
    ) -> AsyncGenerator[str]:
        """Pieces of one answer's text as they come (`handle.options(stream=True).stream.remote(...)`)."""
        async with aclosing(python_calls.stream(self, text, sampling_params, adapter)) as pieces:
            async for piece in pieces:
                yield piece

    async def list_adapters(self) -> list[dict[str, Any]]:
        found = self.registry.page((CatalogEntry,), limit=self.registry.num_adapters)
        return [adapter_body(entry) for entry in found.entries if isinstance(entry, CatalogEntry)]

    async def load(self, name: str, path: str) -> dict[str, Any]:
        caller = handle_caller()
        request = LoadRequest(caller.tenant_id, name, path, caller.who)
        return adapter_body((await self._store.load_and_wait(request))[1])

    async def unload(self, name: str) -> dict[str, Any]:
        caller = handle_caller()
        job, entry = await self.management.unload(name, tenant_id=caller.tenant_id, who=caller.who)
        return unloaded_body(entry, job)

    async def replica_stats(self) -> list[dict[str, Any]]:
        """Counts of every engine replica on the table: for tests and operators."""
        replica_ids = sorted(self._placer.table.replicas)
        results = await asyncio.gather(*map(self._transport.stats, replica_ids), return_exceptions=True)
        return [result for result in results if isinstance(result, dict)]

    # -- what the HTTP routes need (`HttpService`) ------------------------------------------------------

    @property
    def registry(self) -> RegistryView:
        return self._registry.view

    def is_ready(self) -> bool:
        return bool(self._dispatcher.links.usable_loads())

    def observe(self, route: str, status: int, job: Job | None) -> None:
        first = job.requests[0] if job is not None else None
        self._metrics.request(
            route,
            status,
            arrival_s=first.arrival_s if first is not None else None,
            first_s=job.progress.first_s if job is not None else None,
            is_adapter=first is not None and first.adapter is not None,
            usages=job.usages if job is not None else [],
        )

    # -- inner parts --------------------------------------------------------------------------------

    def _resolve(self, name: str, key: str) -> AdapterRef | None:
        """What a name means now. One that is on no device is read while its request is tokenized and placed."""
        ref = self.registry.resolve(name, key)
        if ref is not None and ref.digest not in self._expected and not self._placer.table.is_resident(ref.digest):
            self._expected.add(ref.digest)
            asyncio.get_running_loop().create_task(self._expect(ref), context=contextvars.Context())
        return ref

    async def _expect(self, ref: AdapterRef) -> None:
        try:
            await self._store.expect(ref)
        except NotReady as error:
            logger.info("adapter %s is not read ahead: %s", ref.name, error)
        finally:
            self._expected.discard(ref.digest)

    def _count_adapters(self) -> None:
        self._metrics.adapters(self.registry.num_adapters)

    def make_asgi_app(self) -> ASGIApp:
        return make_app(self)

    async def __del__(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await self._dispatcher.close()
