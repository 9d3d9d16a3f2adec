"""The routes of adapters: register, look at, change, unload.

In: `Management`. Out: routes under /v1/loras. Rule: what a route changes is changed in the registry, for every ingress.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from app.config import TrafficWeight
from app.deployments.ingress.compositions import ComposeBody
from app.deployments.ingress.describing import described
from app.deployments.ingress.http.openapi import takes
from app.deployments.ingress.http.request_parsing import page_body
from app.deployments.ingress.http.routes.management import (
    body_of,
    page_of,
    unloaded_answer,
    wants_to_wait,
)
from app.deployments.ingress.schemas.request_model import Body, Items
from app.deployments.ingress.serializers.loras import adapter_body, description_body, job_body
from app.deployments.ingress.service import IngressService
from app.deployments.ingress.tenants import Caller, check_settings, compose_request, http_caller, load_request
from app.deployments.registry.entries import MAX_REGISTRATIONS, CatalogEntry, LoadRequest, Registration, cannot_pin
from app.engine.adapters.composing.composition import shown_source
from app.engine.errors import InvalidRequest


class RegisterAdapterBody(Body):
    """`path`: where the adapter is; or `compose`: the registered adapters that it is made of.

    `wait`: answer when the adapter is served, or with what made it fail, instead of at once. `read` false: only know
    the name and its place; the first request for it has it read.
    """

    name: str
    path: str | None = None
    compose: ComposeBody | None = None
    wait: bool = False
    read: bool = True
    pinned: bool | None = None
    traffic_weight: TrafficWeight | None = None
    description: str | None = None


class ManifestEntry(Body):
    """As in `RegisterAdapterBody`."""

    name: str
    path: str
    traffic_weight: TrafficWeight | None = None
    description: str | None = None


class ManifestBody(Body):
    """Names and places, to be known without being read: all of them, or none if one cannot be."""

    adapters: Items[ManifestEntry] = Field(min_length=1, max_length=MAX_REGISTRATIONS)


class ConfigureAdapterBody(Body):
    pinned: bool | None = None
    traffic_weight: TrafficWeight | None = None
    description: str | None = None


def _load_of(body: RegisterAdapterBody, caller: Caller, service: IngressService) -> LoadRequest:
    """Raises InvalidRequest, NotFound, UnsafeSource, ManagementRefused."""
    if body.compose is None and body.path is not None:
        return load_request(caller, body.name, body.path, body.pinned, body.traffic_weight, body.description)
    if body.compose is None or body.path is not None:
        raise InvalidRequest("give either path, where the adapter is, or compose, what it is made of", param="path")
    composition = service.frontend.combined(body.compose.adapters, caller, recipe=body.compose.recipe)
    return compose_request(caller, body.name, composition, body.pinned, body.traffic_weight, body.description)


def _fields(entry: ManifestEntry) -> tuple[str, str, None, float | None, str | None]:
    return entry.name, entry.path, None, entry.traffic_weight, entry.description


def _registration(load: LoadRequest) -> Registration:
    return Registration(load.name, load.source, load.traffic_weight, load.description)


async def _register_unread(
    body: RegisterAdapterBody, load: LoadRequest, caller: Caller, service: IngressService
) -> Response:
    """Raises InvalidRequest for what only contents that are known can have."""
    if body.compose is not None:
        raise InvalidRequest("read is false, but a combination is made when it is registered", param="read")
    if body.pinned:
        raise cannot_pin(body.name)
    store = service.management.store
    await store.register([_registration(load)], tenant_id=caller.tenant_id, who=caller.who)
    described = await store.describe(load.name, tenant_id=caller.tenant_id)
    return JSONResponse(description_body(load.name, described, ()), status_code=201)


def add_adapter_routes(routes: APIRouter, service: IngressService) -> None:
    """All of /v1/loras."""
    _add_registering_routes(routes, service)
    _add_named_routes(routes, service)


def _add_registering_routes(routes: APIRouter, service: IngressService) -> None:
    """The list, and what makes it longer."""

    @routes.get("/v1/loras", openapi_extra=takes(None, "limit", "after", told="LoraList"))
    async def adapters(request: Request) -> Response:
        """The adapters: what each name means."""
        return page_of(request, service, CatalogEntry, adapter_body)

    @routes.post("/v1/loras", openapi_extra=takes(RegisterAdapterBody, "wait", told="LoraState"))
    async def register(request: Request) -> Response:
        """Load an adapter: 202 and a job, or with wait=true the adapter."""
        body = await body_of(RegisterAdapterBody, request, service)
        caller = http_caller(request)
        load = _load_of(body, caller, service)
        if not body.read:
            return await _register_unread(body, load, caller, service)
        if wants_to_wait(request, body.wait):
            job, entry = await service.management.store.load_and_wait(load)
            return JSONResponse(adapter_body(entry) | {"job": job_body(job)}, status_code=201)
        job = await service.management.store.load(load)
        return JSONResponse(
            {"id": job.name, "object": "lora", "state": job.state, "generation": job.generation, "job": job_body(job)},
            status_code=202,
            headers={"Location": f"/v1/jobs/{job.id}"},
        )

    @routes.post("/v1/loras/manifest", openapi_extra=takes(ManifestBody))
    async def manifest(request: Request) -> Response:
        """Register many adapters without reading them; answers when requests for them are taken."""
        body = await body_of(ManifestBody, request, service)
        caller = http_caller(request)
        known = [_registration(load_request(caller, *_fields(entry))) for entry in body.adapters]
        done = await service.management.store.register(known, tenant_id=caller.tenant_id, who=caller.who)
        counts = {"num_registered": done.num_changed, "num_unchanged": done.num_unchanged}
        return JSONResponse({"object": "manifest"} | counts)


def _add_named_routes(routes: APIRouter, service: IngressService) -> None:
    """What is said of one adapter, and done with it."""

    @routes.post("/v1/loras/{name}/read", openapi_extra=takes(told="Lora"))
    async def read(name: str, request: Request) -> Response:
        """Have a registered adapter read before a request needs it; answers when it is served."""
        caller = http_caller(request)
        job, entry = await service.management.store.read(name, tenant_id=caller.tenant_id, who=caller.who)
        return JSONResponse(adapter_body(entry) | {"job": None if job is None else job_body(job)})

    @routes.get("/v1/loras/{name}", openapi_extra=takes(told="LoraState"))
    async def adapter(name: str, request: Request) -> Response:
        """One adapter: its state, where it is, why its last load failed, and what was seen of its requests."""
        return JSONResponse(await described(service.management, service.activity, name, http_caller(request)))

    @routes.patch("/v1/loras/{name}", openapi_extra=takes(ConfigureAdapterBody, told="Lora"))
    async def configure(name: str, request: Request) -> Response:
        """Change an adapter's pin, traffic weight or description."""
        body = await body_of(ConfigureAdapterBody, request, service)
        caller = http_caller(request)
        check_settings(caller, body.pinned, body.traffic_weight, body.description)
        entry = await service.management.store.configure(
            name,
            tenant_id=caller.tenant_id,
            who=caller.who,
            pinned=body.pinned,
            traffic_weight=body.traffic_weight,
            description=body.description,
        )
        return JSONResponse(adapter_body(entry))

    @routes.delete("/v1/loras/{name}", openapi_extra=takes(None, "wait", told="LoraState"))
    async def delete(name: str, request: Request) -> Response:
        """Unload an adapter; answers when running requests have ended."""
        return await unloaded_answer(request, service, name)

    @routes.get("/v1/loras/{name}/generations", openapi_extra=takes(told="LoraGenerationList"))
    async def generations(name: str, request: Request) -> Response:
        """Everything a name has meant."""
        tenant_id = http_caller(request).tenant_id
        data = [
            {
                "id": item.ref.generation,
                "digest": item.ref.digest,
                "path": shown_source(item.ref.uri),
                "max_rank": item.max_rank,
                "size_bytes": item.size_bytes,
                "created": int(item.registered_s),
                "registered_by": item.registered_by,
            }
            for item in await service.management.store.generations(name, tenant_id=tenant_id)
        ]
        return JSONResponse(page_body(data, has_more=False))
