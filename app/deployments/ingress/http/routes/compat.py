"""Loading and unloading of adapters in the formats of vLLM and Dynamo; these routes answer when the work is done."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from app.deployments.ingress.http.openapi import JSON_ERROR
from app.deployments.ingress.http.request_parsing import JsonBody
from app.deployments.ingress.http.routes.loras import WaitQuery, unload_response
from app.deployments.ingress.principal import Principal, http_principal, load_request
from app.deployments.ingress.schemas.loras import (
    LoadAdapterBody,
    LoadedLora,
    LoadLoraBody,
    UnloadAdapterBody,
    UnloadedLora,
    UnloadLoraBody,
)
from app.deployments.ingress.serializers.loras import adapter_body, job_body
from app.deployments.ingress.service import IngressService
from app.engine.errors import InvalidRequest, NotFound

#: `org/repo@revision`: Dynamo's spelling of a repository on the Hugging Face Hub.
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*@\w[\w./-]*", re.ASCII)


def add_compat_routes(routes: APIRouter, service: IngressService) -> None:
    @routes.post("/v1/load_lora_adapter", response_class=PlainTextResponse, responses=JSON_ERROR)
    async def load_adapter(request: Request, body: JsonBody[LoadAdapterBody]) -> Response:
        """Load an adapter (vLLM's format)."""
        caller = http_principal(request)
        load = load_request(caller, body.lora_name, body.lora_path, adapters=service.adapters_config)
        if not body.load_inplace and _is_loaded(service, body.lora_name, caller):
            raise InvalidRequest(
                f"The lora adapter {body.lora_name[:80]!r} has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
                param="load_inplace",
            )
        await service.adapter_admin.store.load_and_wait(load)
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
        load = load_request(
            caller, body.lora_model, source, body.pin_lora, body.traffic_weight, adapters=service.adapters_config
        )
        job, entry = await service.adapter_admin.store.load_and_wait(load)
        done = {"lora_model": body.lora_model, "status": "success"}
        return JSONResponse(adapter_body(entry) | done | {"job": job_body(job)})

    @routes.post("/v1/unload_lora", response_model=UnloadedLora, responses={202: {"model": UnloadedLora}})
    async def unload(
        request: Request, body: JsonBody[UnloadLoraBody], query: Annotated[WaitQuery, Query()]
    ) -> Response:
        """Unload an adapter (Dynamo's format)."""
        _check_base(service, body.base_model)
        done = {"lora_model": body.lora_model, "status": "success"}
        return await unload_response(request, service, query, body.lora_model, done)


def _is_loaded(service: IngressService, name: str, caller: Principal) -> bool:
    entry = service.registry.adapter(name, caller.tenant_id)
    return entry is not None and entry.is_read


def _dynamo_source(body: LoadLoraBody, caller: Principal) -> str:
    """The adapter's source; without `lora_path` it is the folder of its name."""
    if body.lora_path is None:
        return f"{caller.tenant_id}/{body.lora_model}" if caller.kind == "project" else body.lora_model
    return f"hf://{body.lora_path}" if _ON_HUB.fullmatch(body.lora_path) else body.lora_path


def _check_base(service: IngressService, base_model: str | None) -> None:
    if base_model is not None and not service.preprocessor.resolver.is_base(base_model):
        raise NotFound(f"there is no base model {base_model[:80]!r} here; this server's is {service.base_name!r}")
