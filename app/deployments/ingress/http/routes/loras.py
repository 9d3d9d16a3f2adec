"""/v1/loras: register, list, change and unload adapters. Changes go to the registry, so they apply to every ingress.

Lists are read from this ingress's copy of the registry and cost no call; a single adapter is read from the registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.adapter_registration import (
    adapter_status,
    defaults_json,
    load_and_wait,
    load_request_of,
    registration,
)
from app.deployments.ingress.http.openapi import takes_content
from app.deployments.ingress.http.request_parsing import (
    FORM_TYPE,
    MAX_FIELD_BYTES,
    Flag,
    JsonBody,
    PageQuery,
    QueryParams,
    WholeNumber,
    body_parts,
    page_body,
    read_form,
)
from app.deployments.ingress.principal import check_settings, http_principal, load_request
from app.deployments.ingress.schemas.loras import (
    ConfigureAdapterBody,
    DynamoLora,
    Lora,
    LoraGeneration,
    LoraPage,
    LoraStatus,
    ManifestBody,
    ManifestResult,
    RegisterAdapterBody,
)
from app.deployments.ingress.schemas.response_model import PageResponse
from app.deployments.ingress.serializers.loras import (
    adapter_body,
    dynamo_fields,
    job_body,
    load_warnings,
    loaded_body,
    unload_body,
)
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import (
    UPLOADED,
    CatalogEntry,
    LoadRequest,
    RegistryJob,
)
from app.engine.adapters.combining.combination import display_source
from app.engine.errors import InvalidRequest
from app.engine.scheduling.fair_limiter import FairSemaphore
from app.model_names import split_version
from app.redaction import holds_key


def _from_dynamo(body: RegisterAdapterBody) -> RegisterAdapterBody:
    """Dynamo's `lora_name` and `source` as name and path. Raises InvalidRequest."""
    if body.lora_name is None or body.source is None or body.name is not None or body.path is not None:
        raise InvalidRequest(
            "give either name and path, or lora_name and source", param="source" if body.source is None else "lora_name"
        )
    return body.model_copy(update={"name": body.lora_name, "path": body.source.uri, "wait": True})


def add_adapter_routes(routes: APIRouter, service: IngressService) -> None:
    _add_collection_routes(routes, service)
    _add_adapter_routes(routes, service)
    _add_upload_route(routes, service)


def _add_collection_routes(routes: APIRouter, service: IngressService) -> None:
    @routes.get("/v1/loras", response_model=LoraPage)
    async def adapters(request: Request, query: Annotated[AdapterQuery, Query()]) -> Response:
        """List adapters, by name or as `sort` says: those whose name or description contains `search`."""
        return await _adapter_page(service, http_principal(request).tenant_id, query)

    @routes.post("/v1/loras", response_model=LoraStatus, status_code=202, responses={201: {"model": DynamoLora}})
    async def register(
        request: Request, body: JsonBody[RegisterAdapterBody], query: Annotated[WaitQuery, Query()]
    ) -> Response:
        """Load an adapter: 202 with a job, or the adapter if wait is true."""
        caller = http_principal(request)
        is_dynamo = body.lora_name is not None or body.source is not None
        if is_dynamo:
            body = _from_dynamo(body)
        if body.lazy or (body.wait if query.wait is None else query.wait):
            entry = await load_and_wait(body, caller, service)
            extra = dynamo_fields(entry["id"], "loaded") if is_dynamo and not body.lazy else {}
            return JSONResponse(entry | extra, status_code=201)
        load = load_request_of(body, caller, service)
        job = await service.adapter_admin.store.load(load)
        return JSONResponse(
            {"id": job.name, "object": "lora", "state": job.state, "generation": job.generation, "job": job_body(job)},
            status_code=202,
            headers={"Location": f"/v1/jobs/{job.id}"},
        )

    @routes.post("/v1/loras/manifest", response_model=ManifestResult)
    async def manifest(request: Request, body: JsonBody[ManifestBody]) -> Response:
        """Register many adapters without reading them; all of them or none."""
        caller = http_principal(request)
        loads = [
            load_request(
                caller,
                e.name,
                e.path,
                None,
                e.traffic_weight,
                e.description,
                defaults_json(e.defaults),
                adapters=service.adapters_config,
            )
            for e in body.adapters
        ]
        new = list(map(registration, loads))
        done = await service.adapter_admin.store.register(new, tenant_id=caller.tenant_id, who=caller.who)
        counts = {"num_registered": done.num_changed, "num_unchanged": done.num_unchanged}
        return JSONResponse({"object": "manifest"} | counts)


def _add_adapter_routes(routes: APIRouter, service: IngressService) -> None:
    @routes.post("/v1/loras/{name:model}/load", response_model=Lora)
    async def load(name: str, request: Request) -> Response:
        """Read a lazily registered adapter before a request needs it; answers when it is served."""
        caller = http_principal(request)
        job, entry = await service.adapter_admin.store.load_registered(name, tenant_id=caller.tenant_id, who=caller.who)
        return JSONResponse(loaded_body(entry, job, service.model_config))

    @routes.get("/v1/loras/{name:model}", response_model=LoraStatus)
    async def adapter(name: str, request: Request) -> Response:
        """An adapter's state, residency, last error, request statistics, and the combinations that use it."""
        caller = http_principal(request)
        status = await adapter_status(name, caller, service)
        found = service.registry.dependents(caller.tenant_id, split_version(name)[0])
        dependents = [{"project_id": tenant_id, "name": each} for tenant_id, each in found]
        warnings = load_warnings(status, service.model_config)
        return JSONResponse({**status, "dependents": dependents, "warnings": warnings})

    @routes.patch("/v1/loras/{name:model}", response_model=Lora)
    async def configure(name: str, request: Request, body: JsonBody[ConfigureAdapterBody]) -> Response:
        """Change an adapter's pin, traffic weight, description or defaults, which are replaced as a whole."""
        caller, defaults = http_principal(request), defaults_json(body.defaults)
        check_settings(caller, body.pinned, body.traffic_weight, body.description, defaults)
        entry = await service.adapter_admin.store.configure(
            name,
            tenant_id=caller.tenant_id,
            who=caller.who,
            pinned=body.pinned,
            traffic_weight=body.traffic_weight,
            description=body.description,
            defaults=defaults,
        )
        return JSONResponse(adapter_body(entry))

    @routes.delete("/v1/loras/{name:model}", response_model=DynamoLora, responses={202: {"model": LoraStatus}})
    async def delete(name: str, request: Request, query: Annotated[WaitQuery, Query()]) -> Response:
        """Unload an adapter; answers when its running requests have ended."""
        done = {} if query.wait is False else dynamo_fields(split_version(name)[0], "unloaded")
        return await unload_response(request, service, query, name, done)

    @routes.get("/v1/loras/{name:model}/generations", response_model=PageResponse[LoraGeneration])
    async def generations(name: str, request: Request) -> Response:
        """The generations of a name: the contents that it has had."""
        tenant_id = http_principal(request).tenant_id
        data = [
            {
                "id": item.ref.generation,
                "digest": item.ref.digest,
                "path": display_source(item.ref.uri),
                "max_rank": item.max_rank,
                "size_bytes": item.size_bytes,
                "created": int(item.registered_s),
                "registered_by": item.registered_by,
            }
            for item in await service.adapter_admin.store.generations(name, tenant_id=tenant_id)
        ]
        return JSONResponse(page_body(data, has_more=False))


class AdapterQuery(PageQuery):
    """`sort`: a field, with a minus for the largest or newest first. `offset`: entries to leave out, where the order is
    not that of names and `after` says nothing."""

    search: str | None = None
    state: Literal["REGISTERED", "LOADED"] | None = None
    pinned: Flag | None = None
    sort: Literal[
        "name", "-name", "created", "-created", "size_bytes", "-size_bytes", "max_rank", "-max_rank",
        "traffic_weight", "-traffic_weight",
    ] = "name"  # fmt: skip
    offset: Annotated[int, WholeNumber(0, 10**9)] = 0


#: Entries that are looked at between two turns of the event loop.
_TURN = 500


async def _adapter_page(service: IngressService, tenant_id: str, query: AdapterQuery) -> Response:
    """Raises InvalidRequest for `after` in another order than that of names."""
    registry = service.registry
    if query.after is not None and (query.sort != "name" or query.offset):
        raise InvalidRequest("after goes on in the order of names; with sort and offset leave it out", param="after")
    names = registry.adapter_names(tenant_id)
    field, is_descending = query.sort.removeprefix("-"), query.sort.startswith("-")
    if query.search is None and query.state is None and query.pinned is None and field == "name":
        if query.after is None:
            ordered = names[::-1] if is_descending else names
            entries = [registry.adapter(name, tenant_id) for name in ordered[query.offset :][: query.limit]]
            num_before = query.offset + len(entries)
        else:
            page = registry.page((CatalogEntry,), limit=query.limit, after=query.after, tenant_id=tenant_id)
            entries = [each for each in page.entries if isinstance(each, CatalogEntry)]
            num_before = len(names) - page.has_more
        return _adapter_response([each for each in entries if each is not None], num_before, len(names))
    found = []
    for number, name in enumerate([*names]):
        if number % _TURN == _TURN - 1:
            await asyncio.sleep(0)
        entry = registry.adapter(name, tenant_id)
        if entry is not None and _matches(entry, query):
            found.append(entry)
    if field != "name":
        found.sort(key=lambda entry: (_sort_value(entry, field), entry.name), reverse=is_descending)
    elif is_descending:
        found.reverse()
    total = len(found)
    if query.after is not None:
        found = [entry for entry in found if entry.name > query.after]
    page_entries = found[query.offset :][: query.limit]
    num_before = total - len(found) + query.offset + len(page_entries)
    return _adapter_response(page_entries, num_before, total)


def _adapter_response(entries: Sequence[CatalogEntry], num_before: int, total: int) -> Response:
    """`num_before`: entries up to the last of the page."""
    return JSONResponse(page_body([*map(adapter_body, entries)], has_more=num_before < total) | {"total": total})


def _matches(entry: CatalogEntry, query: AdapterQuery) -> bool:
    search = (query.search or "").lower()
    return (
        (search in entry.name.lower() or search in entry.description.lower() or entry.ref.digest.startswith(search))
        and query.state in (None, entry.state.value)
        and query.pinned in (None, entry.pinned)
    )


def _sort_value(entry: CatalogEntry, field: str) -> float:
    return {
        "created": entry.registered_s,
        "size_bytes": entry.size_bytes,
        "max_rank": entry.max_rank,
        "traffic_weight": entry.traffic_weight,
    }[field]


class WaitQuery(QueryParams):
    """`wait`: answer when the work is done instead of at once."""

    wait: Flag | None = None


async def unload_response(
    request: Request,
    service: IngressService,
    query: WaitQuery,
    name: str,
    extra_fields: Mapping[str, Any] = MappingProxyType({}),
) -> Response:
    """Unload one of the caller's adapters. Raises what `AdapterAdmin.unload` raises."""
    wait = query.wait is not False
    caller = http_principal(request)
    job, entry = await service.adapter_admin.unload(name, tenant_id=caller.tenant_id, who=caller.who, wait=wait)
    return JSONResponse(unload_body(entry, job) | dict(extra_fields), status_code=200 if wait else 202)


CONFIG_HEADER = "X-Adapter-Config"
#: The form of an upload, for `/openapi.json`.
_FORM = {
    "type": "object",
    "required": ["config", "weights"],
    "properties": {"config": {"type": "string"}, "weights": {"type": "string", "format": "binary"}},
}
#: Concurrent uploads of one ingress and of one project there, and the bytes of a part that it sends to the store.
MAX_UPLOADS, MAX_UPLOADS_PER_PROJECT = 4, 2
PART_BYTES = 4 << 20


def _add_upload_route(routes: APIRouter, service: IngressService) -> None:
    uploads = FairSemaphore("uploads of adapters", MAX_UPLOADS, max_per_tenant=MAX_UPLOADS_PER_PROJECT, max_waiting=0)
    content = takes_content("application/octet-stream", {"type": "string", "format": "binary"})
    content["requestBody"]["content"][FORM_TYPE] = {"schema": _FORM}

    @routes.put("/v1/loras/{name:model}/weights", response_model=Lora, openapi_extra=content)
    async def put_weights(name: str, request: Request) -> Response:
        """Load an adapter from a safetensors file and its adapter_config.json; answers when served.

        The body is the file and a header has the configuration, or it is a form with both, `weights` and `config`.
        The store's reader process validates the bytes.
        """
        caller, limit = http_principal(request), "limits.max_upload_bytes"
        max_bytes = service.preprocessor.limits.max_upload_bytes
        load = LoadRequest(caller.tenant_id, name, UPLOADED, caller.who)
        async with uploads.hold(caller.tenant_id):
            if request.headers.get("content-type", "").lower().startswith(FORM_TYPE):
                form = await read_form(request, max_bytes, limit, max_files=2)
                try:
                    config, weights = await _form_parts(form)
                    job, entry = await _upload(weights, load, config, service)
                finally:
                    await form.close()
            else:
                config = _checked_config(request.headers.get(CONFIG_HEADER, "").encode("latin-1"))
                job, entry = await _upload(body_parts(request, max_bytes, limit), load, config, service)
        return JSONResponse(loaded_body(entry, job, service.model_config))


def _checked_config(config: bytes) -> bytes:
    """Raises InvalidRequest for a configuration that is missing or contains an API key."""
    if not config:
        raise InvalidRequest(
            f"the header {CONFIG_HEADER} is missing; send the adapter_config.json of the weights in it, or both in a "
            f"form ({FORM_TYPE}) as config and weights"
        )
    if holds_key(config.decode("latin-1")):
        raise InvalidRequest("the adapter's configuration contains an API key; leave it out")
    return config


async def _form_parts(form: FormData) -> tuple[bytes, AsyncGenerator[bytes]]:
    """The configuration of an upload's form, and its weights part by part. Raises InvalidRequest."""
    if unknown := sorted(set(form) - {"config", "weights"}):
        raise InvalidRequest(f"{unknown[0][:80]!r} is not a field of an upload", param=unknown[0][:80])
    config, weights = form.get("config"), form.get("weights")
    if not isinstance(weights, UploadFile):
        raise InvalidRequest("weights is missing; send the safetensors file", param="weights")
    text = await config.read(MAX_FIELD_BYTES + 1) if isinstance(config, UploadFile) else (config or "").encode()
    if len(text) > MAX_FIELD_BYTES:
        raise InvalidRequest(f"config is longer than {MAX_FIELD_BYTES} bytes", param="config")

    async def parts() -> AsyncGenerator[bytes]:
        while part := await weights.read(PART_BYTES):
            yield part

    return _checked_config(text), parts()


async def _upload(
    pieces: AsyncIterator[bytes], load: LoadRequest, config: bytes, service: IngressService
) -> tuple[RegistryJob, CatalogEntry]:
    """Send weights to the store part by part, and load them. Raises what the store and reading the body raise."""
    store, offset = service.adapter_admin.store, 0
    upload_id = await store.begin_upload(load, config)
    part = bytearray()
    try:
        async for piece in pieces:
            part += piece
            if len(part) >= PART_BYTES:
                await store.write_upload(upload_id, offset, bytes(part))
                offset += len(part)
                part.clear()
        await store.write_upload(upload_id, offset, bytes(part))
        return await store.end_upload(load, upload_id)
    except BaseException:  # also a client that leaves
        service.adapter_admin.discard_upload(upload_id)
        raise
