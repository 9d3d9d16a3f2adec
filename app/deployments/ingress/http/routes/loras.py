"""The routes of adapters: register, look at, change, unload.

In: `AdapterAdmin`. Out: routes under /v1/loras. Rule: what a route changes is changed in the registry, for every ingress.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.adapter_status import adapter_status
from app.deployments.ingress.http.request_parsing import JsonBody, PageQuery, page_body
from app.deployments.ingress.http.routes.management import WaitQuery, page_of, unloaded_answer
from app.deployments.ingress.principal import Principal, check_settings, compose_request, http_principal, load_request
from app.deployments.ingress.schemas.loras import (
    ConfigureAdapterBody,
    Lora,
    LoraGeneration,
    LoraStatus,
    ManifestBody,
    ManifestEntry,
    ManifestResult,
    RegisterAdapterBody,
)
from app.deployments.ingress.schemas.response_model import PageResponse
from app.deployments.ingress.serializers.loras import adapter_body, description_body, job_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import CatalogEntry, LoadRequest, Registration, cannot_pin_error
from app.engine.adapters.combining.combination import shown_source
from app.engine.errors import InvalidRequest


def _load_of(body: RegisterAdapterBody, caller: Principal, service: IngressService) -> LoadRequest:
    """Raises InvalidRequest, NotFound, UnsafeSource, ManagementRefused."""
    if body.compose is None and body.path is not None:
        return load_request(caller, body.name, body.path, body.pinned, body.traffic_weight, body.description)
    if body.compose is None or body.path is not None:
        raise InvalidRequest("give either path, where the adapter is, or compose, what it is made of", param="path")
    composition = service.frontend.finder.combined(body.compose.adapters, caller, recipe=body.compose.recipe)
    return compose_request(caller, body.name, composition, body.pinned, body.traffic_weight, body.description)


def _fields(entry: ManifestEntry) -> tuple[str, str, None, float | None, str | None]:
    return entry.name, entry.path, None, entry.traffic_weight, entry.description


def _registration(load: LoadRequest) -> Registration:
    return Registration(load.name, load.source, load.traffic_weight, load.description)


async def _register_lazily(
    body: RegisterAdapterBody, load: LoadRequest, caller: Principal, service: IngressService
) -> Response:
    """Raises InvalidRequest for what only contents that are known can have."""
    if body.compose is not None:
        raise InvalidRequest(
            "lazy is true, but a combination is made when it is registered; leave lazy out", param="lazy"
        )
    if body.pinned:
        raise cannot_pin_error(body.name)
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

    @routes.get("/v1/loras", response_model=PageResponse[Lora])
    async def adapters(request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """The adapters: what each name means."""
        return page_of(request, service, query, CatalogEntry, adapter_body)

    @routes.post("/v1/loras", response_model=LoraStatus, status_code=202, responses={201: {"model": LoraStatus}})
    async def register(
        request: Request, body: JsonBody[RegisterAdapterBody], query: Annotated[WaitQuery, Query()]
    ) -> Response:
        """Load an adapter: 202 and a job, or with wait=true the adapter."""
        caller = http_principal(request)
        load = _load_of(body, caller, service)
        if body.lazy:
            return await _register_lazily(body, load, caller, service)
        if body.wait if query.wait is None else query.wait:
            job, entry = await service.management.store.load_and_wait(load)
            return JSONResponse(adapter_body(entry) | {"job": job_body(job)}, status_code=201)
        job = await service.management.store.load(load)
        return JSONResponse(
            {"id": job.name, "object": "lora", "state": job.state, "generation": job.generation, "job": job_body(job)},
            status_code=202,
            headers={"Location": f"/v1/jobs/{job.id}"},
        )

    @routes.post("/v1/loras/manifest", response_model=ManifestResult)
    async def manifest(request: Request, body: JsonBody[ManifestBody]) -> Response:
        """Register many adapters without reading them; answers when requests for them are taken."""
        caller = http_principal(request)
        known = [_registration(load_request(caller, *_fields(entry))) for entry in body.adapters]
        done = await service.management.store.register(known, tenant_id=caller.tenant_id, who=caller.who)
        counts = {"num_registered": done.num_changed, "num_unchanged": done.num_unchanged}
        return JSONResponse({"object": "manifest"} | counts)


def _add_named_routes(routes: APIRouter, service: IngressService) -> None:
    """What is said of one adapter, and done with it."""

    @routes.post("/v1/loras/{name}/load", response_model=Lora)
    async def load(name: str, request: Request) -> Response:
        """Load a registered adapter before a request needs it; answers when it is served."""
        caller = http_principal(request)
        job, entry = await service.management.store.load_registered(name, tenant_id=caller.tenant_id, who=caller.who)
        return JSONResponse(adapter_body(entry) | {"job": None if job is None else job_body(job)})

    @routes.get("/v1/loras/{name}", response_model=LoraStatus)
    async def adapter(name: str, request: Request) -> Response:
        """One adapter: its state, where it is, why its last load failed, and what was seen of its requests."""
        return JSONResponse(await adapter_status(service.management, service.activity, name, http_principal(request)))

    @routes.patch("/v1/loras/{name}", response_model=Lora)
    async def configure(name: str, request: Request, body: JsonBody[ConfigureAdapterBody]) -> Response:
        """Change an adapter's pin, traffic weight or description."""
        caller = http_principal(request)
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

    @routes.delete("/v1/loras/{name}", response_model=LoraStatus, responses={202: {"model": LoraStatus}})
    async def delete(name: str, request: Request, query: Annotated[WaitQuery, Query()]) -> Response:
        """Unload an adapter; answers when running requests have ended."""
        return await unloaded_answer(request, service, query, name)

    @routes.get("/v1/loras/{name}/generations", response_model=PageResponse[LoraGeneration])
    async def generations(name: str, request: Request) -> Response:
        """Everything a name has meant."""
        tenant_id = http_principal(request).tenant_id
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
