"""/v1/batches in OpenAI's format: create, list, retrieve, cancel. `batches.runner` does the work.

A batch belongs to the tenant of the key that created it; other tenants get a 404.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.request_parsing import JsonBody, PageQuery, page_body
from app.deployments.ingress.principal import inference_principal
from app.deployments.ingress.schemas import batches as schemas
from app.deployments.ingress.schemas.batches import BatchBody
from app.deployments.ingress.schemas.response_model import PageResponse
from app.deployments.ingress.serializers.loras import whole_seconds
from app.deployments.ingress.service import IngressService
from app.deployments.object_storage.models import Batch, NewBatch

DAY_S = 86_400.0


def add_batch_routes(app: FastAPI, service: IngressService) -> None:
    @app.post("/v1/batches", response_model=schemas.BatchResponse)
    async def create(request: Request, body: JsonBody[BatchBody]) -> Response:
        """Run the requests of a file within 24 hours, at lower priority than interactive requests."""
        caller, config = inference_principal(request), service.storage_config
        life_s = config.retention_days * DAY_S
        if body.output_expires_after is not None:
            life_s = min(life_s, body.output_expires_after.seconds)
        new_batch = NewBatch(
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            window_s=DAY_S,
            output_life_s=life_s,
            max_open=config.max_open_batches,
            max_bytes=config.max_tenant_bytes,
            note=json.dumps(body.metadata or {}),
        )
        batch = await service.storage.create_batch(new_batch)
        service.wake_batches()
        return JSONResponse(batch_body(batch))

    @app.get("/v1/batches", response_model=PageResponse[schemas.BatchResponse])
    async def batches(request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """List the caller's batches, newest first."""
        tenant_id = inference_principal(request).tenant_id
        found = await service.storage.batch_page(tenant_id=tenant_id, limit=query.limit, after=query.after)
        return JSONResponse(page_body([batch_body(batch) for batch in found.batches], has_more=found.has_more))

    @app.get("/v1/batches/{batch_id}", response_model=schemas.BatchResponse)
    async def batch(request: Request, batch_id: str) -> Response:
        """Retrieve a batch."""
        tenant_id = inference_principal(request).tenant_id
        return JSONResponse(batch_body(await service.storage.batch(batch_id, tenant_id=tenant_id)))

    @app.post("/v1/batches/{batch_id}/cancel", response_model=schemas.BatchResponse)
    async def cancel(request: Request, batch_id: str) -> Response:
        """Cancel a batch; its finished answers are kept."""
        tenant_id = inference_principal(request).tenant_id
        found = await service.storage.cancel_batch(batch_id, tenant_id=tenant_id)
        service.wake_batches()
        return JSONResponse(batch_body(found))


def batch_body(batch: Batch) -> dict[str, Any]:
    """A batch in OpenAI's format."""
    final = ("completed", "failed", "expired", "cancelled")
    times = {f"{status}_at": whole_seconds(batch.ended_s if batch.status == status else None) for status in final}
    errors = json.loads(batch.errors)
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": whole_seconds(batch.created_s),
        "in_progress_at": whole_seconds(batch.began_s),
        "expires_at": whole_seconds(batch.expires_s),
        "finalizing_at": None if batch.status == "failed" else whole_seconds(batch.ended_s),
        "cancelling_at": whole_seconds(batch.cancelling_s),
        **times,
        "request_counts": {"total": batch.num_lines, "completed": batch.num_completed, "failed": batch.num_failed},
        "metadata": json.loads(batch.note) or None,
    }
