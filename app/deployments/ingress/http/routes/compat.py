"""Loading and unloading of adapters in the formats of vLLM, Dynamo and SGLang; these routes answer when it is done."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from app.deployments.ingress.http.openapi import JSON_ERROR
from app.deployments.ingress.http.request_parsing import MAX_PAGE, JsonBody
from app.deployments.ingress.http.routes.loras import WaitQuery, unload_response
from app.deployments.ingress.principal import Principal, http_principal, load_request
from app.deployments.ingress.schemas.loras import (
    LoadAdapterBody,
    LoadedAdapters,
    LoadedLora,
    LoadLoraBody,
    PinnableAdapterBody,
    UnloadAdapterBody,
    UnloadedLora,
    UnloadLoraBody,
)
from app.deployments.ingress.serializers.loras import adapter_body, loaded_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import CatalogEntry, RegistryJob
from app.engine.errors import InvalidRequest, ModelNotFound, NotFound, PolyloraError, UnsafeSource

#: `org/repo` or `org/repo@revision`: how other servers spell a repository on the Hugging Face Hub.
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?P<revision>@\w[\w./-]*)?", re.ASCII)


def add_compat_routes(routes: APIRouter, service: IngressService) -> None:
    @routes.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=JSON_ERROR)
    async def load_adapter(request: Request, body: JsonBody[LoadAdapterBody]) -> Response:
        """Load an adapter (vLLM's format)."""
        caller = http_principal(request)
        if not body.load_inplace and _is_loaded(service, body.lora_name, caller):
            raise InvalidRequest(
                f"The lora adapter {body.lora_name[:80]!r} has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                param="load_inplace",
            )
        await _load(service, caller, body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, responses=JSON_ERROR)
    async def unload_adapter(
        request: Request, body: JsonBody[UnloadAdapterBody], query: Annotated[WaitQuery, Query()]
    ) -> Response:
        """Unload an adapter (vLLM's format)."""
        await unload_response(request, service, query, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @routes.post("/v1/load_lora", response_model=LoadedLora)
    async def load(request: Request, body: JsonBody[LoadLoraBody]) -> Response:
        """Load an adapter (Dynamo's format)."""
        _check_base(service, body.base_model)
        caller = http_principal(request)
        source = _dynamo_source(body, caller)
        job, entry = await _load(service, caller, body.lora_model, source, body.pin_lora, body.traffic_weight)
        done = {"lora_model": body.lora_model, "status": "success"}
        return JSONResponse(loaded_body(entry, job, service.model_config) | done)

    @routes.post("/v1/unload_lora", response_model=UnloadedLora, responses={202: {"model": UnloadedLora}})
    async def unload(
        request: Request, body: JsonBody[UnloadLoraBody], query: Annotated[WaitQuery, Query()]
    ) -> Response:
        """Unload an adapter (Dynamo's format)."""
        _check_base(service, body.base_model)
        done = {"lora_model": body.lora_model, "status": "success"}
        return await unload_response(request, service, query, body.lora_model, done)

    @routes.post("/load_lora_adapter", response_model=LoadedAdapters)
    async def load_pinnable(request: Request, body: JsonBody[PinnableAdapterBody]) -> Response:
        """Load an adapter (SGLang's format)."""
        caller = http_principal(request)
        if _is_loaded(service, body.lora_name, caller):
            raise InvalidRequest(f"LoRA adapter {body.lora_name[:80]!r} is already loaded; unload it first")
        await _load(service, caller, body.lora_name, body.lora_path, body.pinned)
        return _loaded_adapters(service, caller)

    @routes.post("/unload_lora_adapter", response_model=LoadedAdapters)
    async def unload_pinnable(request: Request, body: JsonBody[UnloadAdapterBody]) -> Response:
        """Unload an adapter (SGLang's format)."""
        await unload_response(request, service, WaitQuery(), body.lora_name)
        return _loaded_adapters(service, http_principal(request))


async def _load(
    service: IngressService,
    caller: Principal,
    name: str,
    path: str,
    pinned: bool | None = None,
    traffic_weight: float | None = None,
) -> tuple[RegistryJob, CatalogEntry]:
    """Load a path, a URI, or what may be a repository of the hub: with a revision it is one, and without the folder of
    this name comes first. Raises what loading raises.
    """
    on_hub = _ON_HUB.fullmatch(path)
    sources = [path] if on_hub is None else [f"hf://{path}"]
    if on_hub is not None and on_hub["revision"] is None:
        sources = [path, f"hf://{path}@main"]
    absent: PolyloraError | None = None
    for source in sources:
        try:
            load = load_request(caller, name, source, pinned, traffic_weight, adapters=service.adapters_config)
            return await service.adapter_admin.store.load_and_wait(load)
        except (NotFound, UnsafeSource) as error:
            absent = absent or error
    assert absent is not None, "there is a source"
    raise absent


def _loaded_adapters(service: IngressService, caller: Principal) -> Response:
    page = service.registry.page((CatalogEntry,), limit=MAX_PAGE, tenant_id=caller.tenant_id)
    found = [adapter_body(entry) for entry in page.entries if isinstance(entry, CatalogEntry)]
    return JSONResponse({"success": True, "loaded_adapters": {each["id"]: each["source"] for each in found}})


def _is_loaded(service: IngressService, name: str, caller: Principal) -> bool:
    entry = service.registry.adapter(name, caller.tenant_id)
    return entry is not None and entry.is_read


def _dynamo_source(body: LoadLoraBody, caller: Principal) -> str:
    """The adapter's source; without `lora_path` it is the folder of its name."""
    if body.lora_path is None:
        return f"{caller.tenant_id}/{body.lora_model}" if caller.kind == "project" else body.lora_model
    return body.lora_path


def _check_base(service: IngressService, base_model: str | None) -> None:
    if base_model is not None and not service.preprocessor.resolver.is_base(base_model):
        raise ModelNotFound(f"there is no base model {base_model[:80]!r} here; this server's is {service.base_name!r}")
