"""Routes for agents beside chat completions: Anthropic's messages, OpenAI's responses, tokens of a text.

In: an `IngressService`. Out: routes. Rule: an answer is a chat completion in other words: it goes through the same
frontend, and is let in, limited, counted and metered as one. What only counts or spells tokens asks no engine: it takes
one request of its caller's limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.openapi import EVENT_STREAM, MESSAGES_ERROR
from app.deployments.ingress.http.request_lifecycle import (
    json_response,
    observe_if_cancelled,
    run_until_disconnect,
    start_task,
    stream_response,
)
from app.deployments.ingress.http.request_parsing import JsonBody
from app.deployments.ingress.http.routes.responses import add_response_routes
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.principal import inference_principal
from app.deployments.ingress.schemas.completions import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from app.deployments.ingress.schemas.messages import CountTokensRequest, MessageResponse, MessagesRequest, TokenCount
from app.deployments.ingress.serializers.content_blocks import collect_blocks
from app.deployments.ingress.serializers.messages import message_body, message_events
from app.deployments.ingress.service import IngressService


def add_messages_routes(app: FastAPI, service: IngressService) -> None:
    """Add them."""
    _add_messages(app, service)
    add_response_routes(app, service)
    _add_tokens(app, service)


def _add_messages(app: FastAPI, service: IngressService) -> None:
    @app.post("/v1/messages", response_model=MessageResponse, responses=EVENT_STREAM | MESSAGES_ERROR)
    async def messages(request: Request, body: JsonBody[MessagesRequest]) -> Response:
        """Answer a conversation, as Anthropic does."""
        job = await start_task(request, service, body.chat())
        if body.stream:
            return await stream_response(request, service, job, "messages", message_events(job, body.model))
        with observe_if_cancelled(service, "messages", job):
            blocks, end = await run_until_disconnect(request, collect_blocks(job))
        return json_response(service, job, "messages", message_body(job, body.model, blocks, end))

    @app.post("/v1/messages/count_tokens", response_model=TokenCount, responses=MESSAGES_ERROR)
    async def count_tokens(request: Request, body: JsonBody[CountTokensRequest]) -> Response:
        """How many tokens a conversation's prompt has."""
        chat, caller = body.chat(), inference_principal(request)
        ref = await service.frontend.finder.find(chat.model, caller, adapters=chat.adapters)
        async with service.tenancy.one_request(caller, ref):
            token_ids = await service.frontend.chat_ids(chat, ref)
        return JSONResponse({"input_tokens": len(token_ids)}, headers=service.tenancy.headers(caller))


def _add_tokens(app: FastAPI, service: IngressService) -> None:
    @app.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(request: Request, body: JsonBody[TokenizeRequest]) -> Response:
        """Token ids of a text, or of a conversation as an answer's prompt has them."""
        frontend, caller = service.frontend, inference_principal(request)

        def told(token_ids: Sequence[int]) -> bytes:
            text_of = frontend.text_model.token_text
            strings = [text_of(token_id) for token_id in token_ids] if body.return_token_strs else None
            fields = {"count": len(token_ids), "max_model_len": frontend.max_model_len, "tokens": list(token_ids)}
            return to_json(fields | {"token_strs": strings})

        ref = await frontend.finder.find(body.model, caller, body.lora_path)
        async with service.tenancy.one_request(caller, ref):
            if body.prompt is None:
                token_ids = await frontend.chat_ids(body, ref)
            else:
                (token_ids,) = await frontend.prompt_ids([body.prompt], "prompt")
            content = await in_worker_if_long(len(token_ids), lambda: told(token_ids))
        return _json(content, service.tenancy.headers(caller))

    @app.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(request: Request, body: JsonBody[DetokenizeRequest]) -> Response:
        """The text of token ids."""
        frontend, caller = service.frontend, inference_principal(request)
        ref = await frontend.finder.find(body.model, caller)
        async with service.tenancy.one_request(caller, ref):
            (token_ids,) = await frontend.prompt_ids([body.tokens], "tokens")
            content = await in_worker_if_long(len(token_ids), lambda: to_json({"prompt": frontend.text_of(token_ids)}))
        return _json(content, service.tenancy.headers(caller))


def _json(content: bytes, headers: Mapping[str, str]) -> Response:
    return Response(content, media_type="application/json", headers=headers)
