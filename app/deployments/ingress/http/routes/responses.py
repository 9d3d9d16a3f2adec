"""/v1/responses: json_response, stored where that is asked for, looked up again.

In: a service that keeps responses. Out: routes. Rule: a response is stored when its request says `store`, with the
whole conversation that it answers, so that `previous_response_id` needs no other; it belongs to the tenant of the key
that asked, and another tenant's is as if it were not there. `instructions` are a request's own and are not handed on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.chat_responses import json_response, start_task, stream_response
from app.deployments.ingress.http.openapi import EVENT_STREAM
from app.deployments.ingress.http.request_lifecycle import counted_if_cancelled, run_until_disconnect
from app.deployments.ingress.http.request_parsing import JsonBody, Order, PageQuery, QueryParams, page_body
from app.deployments.ingress.http.routes.batches import DAY_S
from app.deployments.ingress.principal import inference_principal
from app.deployments.ingress.schemas import responses as schemas
from app.deployments.ingress.schemas.response_model import Deleted, PageResponse
from app.deployments.ingress.schemas.responses import InputItem, InputTokens, InputTokensRequest, ResponsesRequest
from app.deployments.ingress.serializers.content_blocks import finished
from app.deployments.ingress.serializers.responses import Keep, response_body, response_events
from app.deployments.ingress.service import IngressService
from app.deployments.object_storage.models import StoredResponse, not_found_error


class RetrieveQuery(QueryParams):
    """What OpenAI's client may ask of a stored response. It is answered whole, whatever these say."""

    include: list[str] = Field(default_factory=list)
    include_obfuscation: str | None = None
    starting_after: str | None = None
    stream: str | None = None


class ItemQuery(PageQuery):
    """`include` changes nothing."""

    order: Order = "desc"
    include: list[str] = Field(default_factory=list)


def add_response_routes(app: FastAPI, service: IngressService) -> None:
    """Add them."""

    @app.post("/v1/responses", response_model=schemas.Response, responses=EVENT_STREAM)
    async def responses(request: Request, body: JsonBody[ResponsesRequest]) -> Response:
        """Answer a conversation, as OpenAI's newer interface does."""
        caller = inference_principal(request)
        if body.previous_response_id is not None:
            body = body.after(
                _items(await service.storage.response(body.previous_response_id, tenant_id=caller.tenant_id))
            )
        is_stored = service.storage_config.store_responses if body.store is None else body.store
        stored_id = f"resp_{secrets.token_hex(16)}" if is_stored else None
        keep = None if stored_id is None else _keep(service, caller.tenant_id, body, stored_id)
        job = await start_task(request, service, body.chat())
        if body.stream:
            return await stream_response(
                request, service, job, "responses", response_events(job, body, stored_id, keep)
            )
        with counted_if_cancelled(service, "responses", job):
            blocks, end = await run_until_disconnect(request, finished(job))
            told = response_body(job, body, blocks, end, stored_id)
            if keep is not None:
                await keep(told)
        return json_response(service, job, "responses", told)

    @app.post("/v1/responses/input_tokens", response_model=InputTokens)
    async def input_tokens(request: Request, body: JsonBody[InputTokensRequest]) -> Response:
        """How many tokens the prompt of a response has."""
        chat, caller = body.chat(), inference_principal(request)
        ref = await service.frontend.finder.find(chat.model, caller, chat.lora_path, adapters=chat.adapters)
        async with service.tenancy.one_request(caller, ref):
            token_ids = await service.frontend.chat_ids(chat, ref)
        told = {"object": "response.input_tokens", "input_tokens": len(token_ids)}
        return JSONResponse(told, headers=service.tenancy.headers(caller))

    @app.get("/v1/responses/{response_id}", response_model=schemas.Response)
    async def response(
        request: Request,
        response_id: str,
        query: Annotated[RetrieveQuery, Query()],  # noqa: ARG001
    ) -> Response:
        """A stored response."""
        found = await service.storage.response(response_id, tenant_id=inference_principal(request).tenant_id)
        return Response(found.body, media_type="application/json")

    @app.delete("/v1/responses/{response_id}", response_model=Deleted)
    async def delete(request: Request, response_id: str) -> Response:
        """Forget it."""
        await service.storage.delete_response(response_id, tenant_id=inference_principal(request).tenant_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items", response_model=PageResponse[InputItem])
    async def input_items(request: Request, response_id: str, query: Annotated[ItemQuery, Query()]) -> Response:
        """The conversation that it answers, newest first unless `order` is asc."""
        found = await service.storage.response(response_id, tenant_id=inference_principal(request).tenant_id)
        items = json.loads(found.items)[:: 1 if query.order == "asc" else -1]
        if query.after is not None:
            ids = [item["id"] for item in items]
            if query.after not in ids:
                raise not_found_error("item", query.after)
            items = items[ids.index(query.after) + 1 :]
        return JSONResponse(page_body(items[: query.limit], has_more=len(items) > query.limit))


def _items(storage: StoredResponse) -> list[dict[str, Any]]:
    """A conversation with its answer."""
    items: list[dict[str, Any]] = json.loads(storage.items)
    output: list[dict[str, Any]] = json.loads(storage.body)["output"]
    return items + output


def _keep(service: IngressService, tenant_id: str, body: ResponsesRequest, stored_id: str) -> Keep:
    config = service.storage_config
    items = [{"id": f"item_{stored_id}_{number}"} | item for number, item in enumerate(body.items())]

    async def keep(told: Mapping[str, Any]) -> None:
        await service.storage.keep_response(
            StoredResponse(stored_id, json.dumps(items), json.dumps(told)),
            tenant_id=tenant_id,
            life_s=config.retention_days * DAY_S,
            max_count=config.max_responses,
            max_bytes=config.max_response_bytes,
        )

    return keep
