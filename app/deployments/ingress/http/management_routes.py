"""The routes that manage adapters and aliases, in all spellings.

In: `Management` and the ingress' copy of the registry. Out: routes. Lists are read from the copy, so that
they cost no call whatever their length; what is said of one adapter is asked of the registry itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from app.config import TrafficWeight
from app.deployments.ingress.adapter_activity import AdapterActivity
from app.deployments.ingress.compositions import ComposeBody
from app.deployments.ingress.describing import described
from app.deployments.ingress.frontend import Frontend
from app.deployments.ingress.http.bodies import int_query, page_body, page_query, read_json
from app.deployments.ingress.http.openapi import takes
from app.deployments.ingress.management import Management
from app.deployments.ingress.management_bodies import (
    adapter_body,
    alias_body,
    alias_version_body,
    description_body,
    job_body,
    record_body,
    unloaded_body,
)
from app.deployments.ingress.schema import Body, BodyT, Items, parse_body
from app.deployments.ingress.tenants import Caller, check_settings, compose_request, http_caller, load_request
from app.deployments.registry.entries import (
    MAX_REGISTRATIONS,
    AliasEntry,
    AuditRecord,
    CatalogEntry,
    Event,
    LoadRequest,
    Registration,
    cannot_pin,
)
from app.deployments.registry.view import RegistryView
from app.engine.adapters.composing.composition import shown_source
from app.engine.errors import InvalidRequest, NotFound

EntryT = TypeVar("EntryT", CatalogEntry, AliasEntry)
#: Numbers of events and audit records.
_MAX_ID = 2**53
#: `org/repo@revision`: a repository of the hub, as Dynamo writes it.
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*@\w[\w./-]*", re.ASCII)
#: Events that a tenant's own calls cause. Others may be caused by whoever has the same contents.
OWN_EVENTS = frozenset({
    "requested", "routable", "failed", "registered", "registered unread", "draining", "removed",
    "put alias", "promote alias", "roll back alias", "remove alias",
})  # fmt: skip


class LoadAdapterBody(Body):
    """vLLM's spelling. `load_inplace`: a name that means an adapter already is to mean this one."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    lora_name: str


class LoadLoraBody(Body):
    """`/v1/load_lora`, as Dynamo spells it. `base_model` may be left out; otherwise it is the served base's name.

    lora_path: a path, a URI, or `org/repo@revision` of the hub; without it the folder of the adapter's name.
    """

    lora_model: str
    lora_path: str | None = None
    base_model: str | None = None
    pin_lora: bool | None = None
    traffic_weight: TrafficWeight | None = None


class UnloadLoraBody(Body):
    lora_model: str
    base_model: str | None = None


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


class AliasBody(Body):
    """Targets and their weights: {"sql-v1": 95, "sql-v2": 5}."""

    targets: dict[str, float]


class PromoteBody(Body):
    target: str


class RollbackBody(Body):
    version: int | None = Field(default=None, ge=1, lt=2**31)


class ManagedService(Protocol):
    """What these routes need of the ingress."""

    @property
    def frontend(self) -> Frontend: ...

    @property
    def base_name(self) -> str: ...

    @property
    def registry(self) -> RegistryView: ...

    @property
    def management(self) -> Management: ...

    @property
    def activity(self) -> AdapterActivity: ...

    async def status(self, tenant_id: str) -> dict[str, Any]: ...


def add_management_routes(routes: APIRouter, service: ManagedService) -> None:
    """All of them."""
    _add_load_routes(routes, service)
    _add_adapter_routes(routes, service)
    _add_journal_routes(routes, service)
    _add_alias_routes(routes, service)


async def _body(kind: type[BodyT], request: Request, service: ManagedService) -> BodyT:
    return parse_body(kind, await read_json(request, service.frontend.limits.max_body_bytes))


def _wants_to_wait(request: Request, default: bool) -> bool:
    """`?wait=`. Raises InvalidRequest."""
    text = request.query_params.get("wait", str(default))
    wants = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if wants is None:
        raise InvalidRequest(f"wait is {text[:40]!r}; it is true or false", param="wait")
    return wants


def _add_load_routes(routes: APIRouter, service: ManagedService) -> None:
    """Spellings of other servers: they answer when the work is done."""

    @routes.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterBody))
    async def load_adapter(request: Request) -> Response:
        """Load an adapter, as vLLM spells it; answers when it is served."""
        body = await _body(LoadAdapterBody, request, service)
        caller = http_caller(request)
        load = load_request(caller, body.lora_name, body.lora_path)
        if not body.load_inplace and _is_loaded(service, body.lora_name, caller):
            raise InvalidRequest(
                f"The lora adapter {body.lora_name[:80]!r} has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                param="load_inplace",
            )
        await service.management.store.load_and_wait(load)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterBody, "wait"))
    async def unload_adapter(request: Request) -> Response:
        """Unload an adapter, as vLLM spells it."""
        body = await _body(UnloadAdapterBody, request, service)
        await _unload(request, service, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @routes.post("/v1/load_lora", openapi_extra=takes(LoadLoraBody))
    async def load(request: Request) -> Response:
        """Load an adapter, as Dynamo spells it; answers when it is served."""
        body = await _body(LoadLoraBody, request, service)
        _check_base(service, body.base_model)
        caller = http_caller(request)
        source = _dynamo_source(body, caller)
        load = load_request(caller, body.lora_model, source, body.pin_lora, body.traffic_weight)
        job, entry = await service.management.store.load_and_wait(load)
        done = {"lora_model": body.lora_model, "status": "success"}
        return JSONResponse(adapter_body(entry) | done | {"job": job_body(job)})

    @routes.post("/v1/unload_lora", openapi_extra=takes(UnloadLoraBody, "wait"))
    async def unload(request: Request) -> Response:
        """Unload an adapter, as Dynamo spells it."""
        body = await _body(UnloadLoraBody, request, service)
        _check_base(service, body.base_model)
        done = {"lora_model": body.lora_model, "status": "success"}
        return await _unload(request, service, body.lora_model, done)


def _is_loaded(service: ManagedService, name: str, caller: Caller) -> bool:
    entry = service.registry.adapter(name, caller.tenant_id)
    return entry is not None and entry.is_read


def _dynamo_source(body: LoadLoraBody, caller: Caller) -> str:
    """Where an adapter is that is named as Dynamo names it."""
    if body.lora_path is None:
        return f"{caller.tenant_id}/{body.lora_model}" if caller.kind == "project" else body.lora_model
    return f"hf://{body.lora_path}" if _ON_HUB.fullmatch(body.lora_path) else body.lora_path


def _check_base(service: ManagedService, base_model: str | None) -> None:
    if base_model not in (None, service.base_name):
        raise NotFound(f"there is no base model {base_model[:80]!r} here; this server's is {service.base_name!r}")


async def _unload(
    request: Request, service: ManagedService, name: str, besides: Mapping[str, str] = MappingProxyType({})
) -> Response:
    wait = _wants_to_wait(request, True)
    caller = http_caller(request)
    job, entry = await service.management.unload(name, tenant_id=caller.tenant_id, who=caller.who, wait=wait)
    return JSONResponse(unloaded_body(entry, job) | dict(besides), status_code=200 if wait else 202)


def _page(
    request: Request, service: ManagedService, kind: type[EntryT], body: Callable[[EntryT], dict[str, Any]]
) -> Response:
    """The page of names of one kind that the query asks for."""
    page = page_query(request)
    found = service.registry.page((kind,), limit=page.limit, after=page.after, tenant_id=http_caller(request).tenant_id)
    data = [body(entry) for entry in found.entries if isinstance(entry, kind)]
    return JSONResponse(page_body(data, has_more=found.has_more))


def _load_of(body: RegisterAdapterBody, caller: Caller, service: ManagedService) -> LoadRequest:
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
    body: RegisterAdapterBody, load: LoadRequest, caller: Caller, service: ManagedService
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


def _add_adapter_routes(routes: APIRouter, service: ManagedService) -> None:
    @routes.get("/v1/loras", openapi_extra=takes(None, "limit", "after"))
    async def adapters(request: Request) -> Response:
        """The adapters: what each name means."""
        return _page(request, service, CatalogEntry, adapter_body)

    @routes.post("/v1/loras", openapi_extra=takes(RegisterAdapterBody, "wait"))
    async def register(request: Request) -> Response:
        """Load an adapter: 202 and a job, or with wait=true the adapter."""
        body = await _body(RegisterAdapterBody, request, service)
        caller = http_caller(request)
        load = _load_of(body, caller, service)
        if not body.read:
            return await _register_unread(body, load, caller, service)
        if _wants_to_wait(request, body.wait):
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
        body = await _body(ManifestBody, request, service)
        caller = http_caller(request)
        known = [_registration(load_request(caller, *_fields(entry))) for entry in body.adapters]
        done = await service.management.store.register(known, tenant_id=caller.tenant_id, who=caller.who)
        counts = {"num_registered": done.num_changed, "num_unchanged": done.num_unchanged}
        return JSONResponse({"object": "manifest"} | counts)

    @routes.post("/v1/loras/{name}/read", openapi_extra=takes())
    async def read(name: str, request: Request) -> Response:
        """Have a registered adapter read before a request needs it; answers when it is served."""
        caller = http_caller(request)
        job, entry = await service.management.store.read(name, tenant_id=caller.tenant_id, who=caller.who)
        return JSONResponse(adapter_body(entry) | {"job": None if job is None else job_body(job)})

    @routes.get("/v1/loras/{name}")
    async def adapter(name: str, request: Request) -> Response:
        """One adapter: its state, where it is, why its last load failed, and what was seen of its requests."""
        return JSONResponse(await described(service.management, service.activity, name, http_caller(request)))

    @routes.patch("/v1/loras/{name}", openapi_extra=takes(ConfigureAdapterBody))
    async def configure(name: str, request: Request) -> Response:
        """Change an adapter's pin, traffic weight or description."""
        body = await _body(ConfigureAdapterBody, request, service)
        caller = http_caller(request)
        check_settings(caller, body.pinned, body.traffic_weight)
        entry = await service.management.store.configure(
            name,
            tenant_id=caller.tenant_id,
            who=caller.who,
            pinned=body.pinned,
            traffic_weight=body.traffic_weight,
            description=body.description,
        )
        return JSONResponse(adapter_body(entry))

    @routes.delete("/v1/loras/{name}", openapi_extra=takes(None, "wait"))
    async def delete(name: str, request: Request) -> Response:
        """Unload an adapter; answers when running requests have ended."""
        return await _unload(request, service, name)

    @routes.get("/v1/loras/{name}/generations")
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
                "created": item.registered_s,
                "registered_by": item.registered_by,
            }
            for item in await service.management.store.generations(name, tenant_id=tenant_id)
        ]
        return JSONResponse(page_body(data, has_more=False))


def _add_journal_routes(routes: APIRouter, service: ManagedService) -> None:
    @routes.get("/v1/status")
    async def status(request: Request) -> Response:
        """The service as its operator sees it: replicas, tiers, what failed lately."""
        return JSONResponse(await service.status(http_caller(request).tenant_id))

    @routes.get("/v1/jobs/{job_id}")
    async def job(job_id: str, request: Request) -> Response:
        """A load or an unload: its state and its reason."""
        tenant_id = http_caller(request).tenant_id
        return JSONResponse(job_body(await service.management.store.job(job_id, tenant_id=tenant_id)))

    @routes.get("/v1/events", openapi_extra=takes(None, "name", "limit", "before"))
    async def events(request: Request) -> Response:
        """What happened, the newest first."""
        query = _journal_query(request)
        records = await service.management.store.events(
            query.name, limit=query.limit + 1, before=query.before, tenant_id=http_caller(request).tenant_id
        )
        if http_caller(request).kind == "project":  # a page may be shorter than was asked for
            kept = [record for record in records if record.event in OWN_EVENTS]
            return JSONResponse(page_body([asdict(each) for each in kept], has_more=len(records) > query.limit))
        return _journal_page(records, query.limit)

    @routes.get("/v1/audit", openapi_extra=takes(None, "name", "limit", "before"))
    async def audit(request: Request) -> Response:
        """Who asked for what, the newest first."""
        query = _journal_query(request)
        records = await service.management.store.audit(
            query.name, limit=query.limit + 1, before=query.before, tenant_id=http_caller(request).tenant_id
        )
        return _journal_page(records, query.limit)


class _JournalQuery(NamedTuple):
    """`before` is the id of the last record that is known."""

    limit: int
    name: str | None
    before: int | None


def _journal_query(request: Request) -> _JournalQuery:
    """`?name=&limit=&before=`: the newest first."""
    before = int_query(request, "before", 0, _MAX_ID) or None
    return _JournalQuery(int_query(request, "limit", 100), request.query_params.get("name"), before)


def _journal_page(records: Sequence[Event] | Sequence[AuditRecord], limit: int) -> Response:
    return JSONResponse(page_body([record_body(record) for record in records[:limit]], has_more=len(records) > limit))


def _add_alias_routes(routes: APIRouter, service: ManagedService) -> None:
    @routes.get("/v1/aliases", openapi_extra=takes(None, "limit", "after"))
    async def aliases(request: Request) -> Response:
        """Names that stand for adapters."""
        return _page(request, service, AliasEntry, alias_body)

    @routes.get("/v1/aliases/{name}")
    async def alias(name: str, request: Request) -> Response:
        """One alias."""
        entry = service.registry.find(name, http_caller(request).tenant_id)
        if not isinstance(entry, AliasEntry):
            raise NotFound(f"there is no alias {name[:80]!r}; GET /v1/aliases lists them")
        return JSONResponse(alias_body(entry))

    @routes.get("/v1/aliases/{name}/versions")
    async def versions(name: str, request: Request) -> Response:
        """Everything an alias has stood for: what a rollback can bring back."""
        tenant_id = http_caller(request).tenant_id
        found = await service.management.store.alias_versions(name, tenant_id=tenant_id)
        return JSONResponse(page_body([alias_version_body(item) for item in found], has_more=False))

    @routes.put("/v1/aliases/{name}", openapi_extra=takes(AliasBody))
    async def put(name: str, request: Request) -> Response:
        """Send an alias's requests to these adapters, by weight."""
        body = await _body(AliasBody, request, service)
        caller = http_caller(request)
        entry = await service.management.store.put_alias(name, body.targets, tenant_id=caller.tenant_id, who=caller.who)
        return JSONResponse(alias_body(entry))

    @routes.post("/v1/aliases/{name}/promote", openapi_extra=takes(PromoteBody))
    async def promote(name: str, request: Request) -> Response:
        """Send all of an alias's requests to one target."""
        body = await _body(PromoteBody, request, service)
        caller = http_caller(request)
        entry = await service.management.store.promote_alias(
            name, body.target, tenant_id=caller.tenant_id, who=caller.who
        )
        return JSONResponse(alias_body(entry))

    @routes.post("/v1/aliases/{name}/rollback", openapi_extra=takes(RollbackBody))
    async def rollback(name: str, request: Request) -> Response:
        """Bring back an earlier version of an alias."""
        body = RollbackBody() if await _is_empty(request) else await _body(RollbackBody, request, service)
        caller = http_caller(request)
        entry = await service.management.store.roll_back_alias(
            name, body.version, tenant_id=caller.tenant_id, who=caller.who
        )
        return JSONResponse(alias_body(entry))

    @routes.delete("/v1/aliases/{name}")
    async def delete(name: str, request: Request) -> Response:
        """Forget an alias."""
        caller = http_caller(request)
        entry = await service.management.store.remove_alias(name, tenant_id=caller.tenant_id, who=caller.who)
        return JSONResponse(alias_body(entry))


async def _is_empty(request: Request) -> bool:
    return request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
