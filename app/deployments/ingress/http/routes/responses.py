"""/v1/responses in OpenAI's format: create, and retrieve or delete stored ones.

A response whose request has `store` is stored with the whole conversation, so that `previous_response_id` needs no
earlier one. It belongs to the tenant of the key; other tenants get a 404. `instructions` apply to one request only.
An answer that the store does not take is delivered with `store: false`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.error_responses import PreviousResponseNotFound
from app.deployments.ingress.http.event_stream import run_until_disconnect
from app.deployments.ingress.http.openapi import EVENT_STREAM
from app.deployments.ingress.http.request_lifecycle import (
    json_response,
    observe_if_cancelled,
    start_task,
    stream_response,
)
from app.deployments.ingress.http.request_parsing import Flag, JsonBody, Order, PageQuery, QueryParams, page_body
from app.deployments.ingress.http.routes.batches import DAY_S
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.principal import inference_principal
from app.deployments.ingress.schemas import responses as schemas
from app.deployments.ingress.schemas.response_model import DeletedResponse, PageResponse
from app.deployments.ingress.schemas.responses import InputTokens, InputTokensRequest, ResponsesRequest, StoredItem
from app.deployments.ingress.serializers.content_blocks import collect_blocks
from app.deployments.ingress.serializers.responses import (
    StoreResponse,
    response_body,
    response_error_event,
    response_events,
    stored_response_of,
)
from app.deployments.ingress.service import IngressService
from app.deployments.object_storage.models import StoredResponse
from app.deployments.registry.models import not_found_error
from app.deployments.rpc.background_tasks import backoff_s
from app.engine.errors import InvalidRequest, NotFound, NotReady

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=InputTokensRequest)
#: Each is read from the store.
MAX_REFERENCED = 256
#: How long a finished answer waits for the store, which restarts in some seconds; then it is delivered without it.
STORE_TIMEOUT_S = 10.0


class RetrieveQuery(QueryParams):
    """A stored response is returned complete: `include` is ignored, and `stream` is rejected."""

    include: list[str] = Field(default_factory=list)
    include_obfuscation: str | None = None
    starting_after: str | None = None
    stream: Flag = False


class ItemQuery(PageQuery):
    """`include` is ignored."""

    order: Order = "desc"
    include: list[str] = Field(default_factory=list)


def add_response_routes(app: FastAPI, service: IngressService) -> None:
    @app.post("/v1/responses", response_model=schemas.Response, responses=EVENT_STREAM)
    async def responses(request: Request, body: JsonBody[ResponsesRequest]) -> Response:
        """Answer a conversation, complete or as a stream."""
        caller = inference_principal(request)
        if body.previous_response_id is not None:
            try:
                stored = await service.storage.response(body.previous_response_id, tenant_id=caller.tenant_id)
            except NotFound as error:
                raise PreviousResponseNotFound(str(error), param="previous_response_id") from None
            num_chars = len(stored.items) + len(stored.body)
            body = await in_worker_if_long(num_chars, partial(_with_conversation, body, stored))
            request.state.num_body_bytes += num_chars
        body = await _with_references(request, service, body)
        is_stored = service.storage_config.store_responses if body.store is None else body.store
        stored_id = f"resp_{secrets.token_hex(16)}" if is_stored else None
        store = None if stored_id is None else _store_later(service, caller.tenant_id, body, stored_id)
        chat = await in_worker_if_long(request.state.num_body_bytes, body.chat)
        task = await start_task(request, service, chat)
        if body.stream:
            numbers = itertools.count()
            events = response_events(task, body, stored_id, store, numbers)
            as_event = partial(response_error_event, numbers=numbers)
            return await stream_response(request, service, task, "responses", events, as_event)
        with observe_if_cancelled(service, "responses", task):
            blocks, end = await run_until_disconnect(request.receive, collect_blocks(task))
            content = response_body(task, body, blocks, end, stored_id)
            if store is not None:
                content["store"] = await store(content)
        service.observe("responses", 200, task)
        return json_response(service, task, content)

    @app.post("/v1/responses/input_tokens", response_model=InputTokens)
    async def input_tokens(request: Request, body: JsonBody[InputTokensRequest]) -> Response:
        """Count the tokens of a response's prompt."""
        caller = inference_principal(request)
        body = await _with_references(request, service, body)
        chat = await in_worker_if_long(request.state.num_body_bytes, body.chat)
        ref = await service.preprocessor.resolver.resolve(chat.model, caller, chat.lora_path, adapters=chat.adapters)
        async with service.accounting.charge_request(caller, ref):
            token_ids = await service.preprocessor.chat_ids(chat, ref, caller)
        content = {"object": "response.input_tokens", "input_tokens": len(token_ids)}
        return JSONResponse(content, headers=service.accounting.headers(caller))

    @app.get("/v1/responses/{response_id}", response_model=schemas.Response)
    async def response(
        request: Request,
        response_id: str,
        query: Annotated[RetrieveQuery, Query()],
    ) -> Response:
        """Retrieve a stored response."""
        if query.stream:
            raise InvalidRequest("a stored response is not streamed; leave stream out", param="stream")
        found = await service.storage.response(response_id, tenant_id=inference_principal(request).tenant_id)
        return Response(found.body, media_type="application/json")

    @app.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
    async def delete(request: Request, response_id: str) -> Response:
        """Delete a stored response."""
        await service.storage.delete_response(response_id, tenant_id=inference_principal(request).tenant_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items", response_model=PageResponse[StoredItem])
    async def input_items(request: Request, response_id: str, query: Annotated[ItemQuery, Query()]) -> Response:
        """The conversation of a stored response, newest item first unless `order` is asc."""
        found = await service.storage.response(response_id, tenant_id=inference_principal(request).tenant_id)
        items = json.loads(found.items)[:: 1 if query.order == "asc" else -1]
        if query.after is not None:
            ids = [item["id"] for item in items]
            if query.after not in ids:
                raise not_found_error("item", query.after)
            items = items[ids.index(query.after) + 1 :]
        return JSONResponse(page_body(items[: query.limit], has_more=len(items) > query.limit))


def _with_conversation(body: ResponsesRequest, stored: StoredResponse) -> ResponsesRequest:
    """The request after a stored conversation, answer included. Raises InvalidRequest."""
    items: list[dict[str, Any]] = json.loads(stored.items)
    output: list[dict[str, Any]] = json.loads(stored.body)["output"]
    return body.with_input(items + output + body.items())


async def _with_references(request: Request, service: IngressService, body: BodyT) -> BodyT:
    """The request with the items that its input refers to. Raises InvalidRequest, NotFound."""
    references = body.references()
    if not references:
        return body
    response_ids = dict.fromkeys(filter(None, map(stored_response_of, references)))
    if len(response_ids) > MAX_REFERENCED:
        message = (
            f"its items are of {len(response_ids)} stored responses; at most {MAX_REFERENCED} are read: send items"
        )
        raise InvalidRequest(message, param="input")
    tenant_id = inference_principal(request).tenant_id
    found: dict[str, dict[str, Any]] = {}
    for response_id in response_ids:
        with suppress(NotFound):
            stored = await service.storage.response(response_id, tenant_id=tenant_id)
            request.state.num_body_bytes += len(stored.body)
            content = await in_worker_if_long(len(stored.body), partial(json.loads, stored.body))
            found |= {item["id"]: item for item in content["output"]}
    for item_id in references:
        if item_id not in found:
            raise not_found_error(
                "item", item_id, "; items are stored if their request had store: true; otherwise send them"
            )
    items = [found[item["id"]] if item["type"] == "item_reference" else item for item in body.items()]
    return await in_worker_if_long(request.state.num_body_bytes, partial(body.with_input, items))


def _store_later(service: IngressService, tenant_id: str, body: ResponsesRequest, stored_id: str) -> StoreResponse:
    config = service.storage_config

    def stored_response(content: Mapping[str, Any]) -> StoredResponse:
        items = [{"id": f"item_{stored_id}_{number}"} | item for number, item in enumerate(body.items())]
        return StoredResponse(stored_id, json.dumps(items), json.dumps(content))

    async def store(content: Mapping[str, Any]) -> bool:
        response = await asyncio.to_thread(stored_response, content)
        reason = "the store does not answer"
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                for pause_s in backoff_s(0.5, 2.0):
                    try:
                        await service.storage.keep_response(
                            response,
                            tenant_id=tenant_id,
                            life_s=config.retention_days * DAY_S,
                            max_count=config.max_responses,
                            max_bytes=config.max_response_bytes,
                        )
                        return True
                    except NotReady as error:
                        reason = str(error)
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            logger.warning("response %s is not stored: %s", stored_id, reason)
        return False

    return store
