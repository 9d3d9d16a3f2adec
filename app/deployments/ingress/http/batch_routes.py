"""/v1/batches as OpenAI's client uses them: asked for, looked at, cancelled.

In: a service that keeps batches. Out: routes. Rule: a batch belongs to the tenant of the key that asked for it; another
tenant's is as if it were not there. Who works on batches is another's business (`batches.runner`).
"""

from __future__ import annotations

import json
from typing import Any, Literal, Protocol

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from app.config import KeptConfig
from app.deployments.ingress.body import Body, Metadata, parse_body
from app.deployments.ingress.http.bodies import page_body, page_query, read_json
from app.deployments.ingress.http.openapi import takes
from app.deployments.ingress.http.running import RunningService
from app.deployments.ingress.tenants import inference_caller
from app.deployments.kept.client import KeptClient
from app.deployments.kept.entries import Batch, NewBatch

DAY_S = 86_400.0
#: From an hour to 30 days, as OpenAI has it.
MIN_LIFE_S, MAX_LIFE_S = 3600, 2_592_000


class KeepingService(RunningService, Protocol):
    """What routes of kept things need of the ingress."""

    @property
    def kept(self) -> KeptClient: ...

    @property
    def kept_config(self) -> KeptConfig: ...

    def wake_batches(self) -> None:
        """A new batch is there to be worked on."""
        ...


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)


class BatchBody(Body):
    """`metadata`: up to 16 of the client's own words."""

    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    input_file_id: str = Field(max_length=64)
    completion_window: Literal["24h"]
    metadata: Metadata | None = Field(default=None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


def add_batch_routes(app: FastAPI, service: KeepingService) -> None:
    """Add them."""

    @app.post("/v1/batches", openapi_extra=takes(BatchBody))
    async def create(request: Request) -> Response:
        """Have the requests of a file computed when no interactive request wants the engines, within a day."""
        body = parse_body(BatchBody, await read_json(request, service.frontend.limits.max_body_bytes))
        caller, config = inference_caller(request), service.kept_config
        life_s = config.days * DAY_S
        if body.output_expires_after is not None:
            life_s = min(life_s, body.output_expires_after.seconds)
        wanted = NewBatch(
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            window_s=DAY_S,
            output_life_s=life_s,
            max_open=config.max_open_batches,
            note=json.dumps(body.metadata or {}),
        )
        batch = await service.kept.create_batch(wanted)
        service.wake_batches()
        return JSONResponse(batch_body(batch))

    @app.get("/v1/batches", openapi_extra=takes(None, "limit", "after"))
    async def batches(request: Request) -> Response:
        """The caller's batches, newest first."""
        page, tenant_id = page_query(request), inference_caller(request).tenant_id
        found = await service.kept.batch_page(tenant_id=tenant_id, limit=page.limit, after=page.after)
        return JSONResponse(page_body([batch_body(batch) for batch in found.batches], has_more=found.has_more))

    @app.get("/v1/batches/{batch_id}")
    async def batch(request: Request, batch_id: str) -> Response:
        """One of them."""
        tenant_id = inference_caller(request).tenant_id
        return JSONResponse(batch_body(await service.kept.batch(batch_id, tenant_id=tenant_id)))

    @app.post("/v1/batches/{batch_id}/cancel", openapi_extra=takes())
    async def cancel(request: Request, batch_id: str) -> Response:
        """End it; what has been answered stays."""
        tenant_id = inference_caller(request).tenant_id
        found = await service.kept.cancel_batch(batch_id, tenant_id=tenant_id)
        service.wake_batches()
        return JSONResponse(batch_body(found))


def batch_body(batch: Batch) -> dict[str, Any]:
    """As OpenAI tells it."""
    ended = dict.fromkeys(("completed", "failed", "expired", "cancelled"))
    times = {f"{status}_at": _second(batch.ended_s if batch.status == status else None) for status in ended}
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
        "created_at": _second(batch.created_s),
        "in_progress_at": _second(batch.began_s),
        "expires_at": _second(batch.expires_s),
        "finalizing_at": None if batch.status == "failed" else _second(batch.ended_s),
        "cancelling_at": _second(batch.cancelling_s),
        **times,
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "metadata": json.loads(batch.note) or None,
    }


def _second(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)
