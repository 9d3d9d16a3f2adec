"""An adapter that comes as bytes: PUT /v1/loras/{name}/weights.

In: a safetensors file as the body, PEFT's `adapter_config.json` in a header. Out: the adapter, once it is served. Rule:
bytes are not looked at here; they are checked where every adapter is, in the store's reading process. Few uploads
at a time are in this process's memory.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.openapi import takes_content
from app.deployments.ingress.http.request_parsing import read_bytes
from app.deployments.ingress.principal import http_principal
from app.deployments.ingress.schemas.loras import Lora
from app.deployments.ingress.serializers.loras import adapter_body, job_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import UPLOADED, LoadRequest
from app.engine.errors import InvalidRequest, QueueFull
from app.redaction import holds_key

CONFIG_HEADER = "X-Adapter-Config"
#: For `/openapi.json`: a safetensors file.
_WEIGHTS = {"type": "string", "format": "binary"}
#: Uploads that one ingress takes at a time.
MAX_UPLOADS = 4


def add_upload_route(routes: APIRouter, service: IngressService) -> None:
    """Add it."""
    num_running = 0

    @routes.put(
        "/v1/loras/{name}/weights",
        response_model=Lora,
        openapi_extra=takes_content("application/octet-stream", _WEIGHTS),
    )
    async def put_weights(name: str, request: Request) -> Response:
        """Load an adapter from the bytes of its weights; answers when it is served."""
        nonlocal num_running
        config = request.headers.get(CONFIG_HEADER, "")
        if not config:
            raise InvalidRequest(
                f"the header {CONFIG_HEADER} is missing: it has the adapter_config.json of the weights"
            )
        if holds_key(config):
            raise InvalidRequest(f"the header {CONFIG_HEADER} holds an API key; leave it out")
        if num_running >= MAX_UPLOADS:
            raise QueueFull(f"{num_running} adapters are being uploaded here; ask again when some are", retry_after_s=1)
        num_running += 1
        try:
            weights = await read_bytes(request, service.preprocessor.limits.max_upload_bytes, "limits.max_upload_bytes")
            caller = http_principal(request)
            wanted = LoadRequest(caller.tenant_id, name, UPLOADED, caller.who)
            job, entry = await service.management.store.upload(wanted, config.encode("latin-1"), weights)
        finally:
            num_running -= 1
        return JSONResponse(adapter_body(entry) | {"job": job_body(job)})
