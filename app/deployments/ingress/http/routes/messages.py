"""Anthropic's /v1/messages, and /tokenize and /detokenize in vLLM's format.

A message is a chat completion in another format: the same preprocessor, limits and accounting. The routes that only
tokenize or count use no engine and cost their caller one request of its limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.openapi import EVENT_STREAM, MESSAGES_ERROR
from app.deployments.ingress.http.request_lifecycle import (
    json_response,
    run_task,
    start_task,
    stream_response,
)
from app.deployments.ingress.http.request_parsing import JsonBody
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
from app.deployments.ingress.serializers.messages import error_event, message_body, message_events
from app.deployments.ingress.service import IngressService


def add_messages_routes(app: FastAPI, service: IngressService) -> None:
    _add_message_routes(app, service)
    _add_tokenize_routes(app, service)


def _add_message_routes(app: FastAPI, service: IngressService) -> None:
    @app.post("/v1/messages", response_model=MessageResponse, responses=EVENT_STREAM | MESSAGES_ERROR)
    async def messages(request: Request, body: JsonBody[MessagesRequest]) -> Response:
        """Answer a conversation, complete or as a stream."""
        chat = await in_worker_if_long(request.state.num_body_bytes, body.chat)
        task = await start_task(request, service, chat)
        if body.stream:
            events = message_events(task, body.model)
            return await stream_response(request, service, task, "messages", events, error_event)
        blocks, end = await run_task(request, service, task, "messages", collect_blocks(task))
        return json_response(service, task, message_body(task, body.model, blocks, end))

    @app.post("/v1/messages/count_tokens", response_model=TokenCount, responses=MESSAGES_ERROR)
    async def count_tokens(request: Request, body: JsonBody[CountTokensRequest]) -> Response:
        """Count the tokens of a conversation's prompt."""
        caller = inference_principal(request)
        chat = await in_worker_if_long(request.state.num_body_bytes, body.chat)
        ref = await service.preprocessor.resolver.resolve(chat.model, caller, adapters=chat.adapters)
        async with service.accounting.charge_request(caller, ref):
            token_ids = await service.preprocessor.chat_ids(chat, ref, caller)
        return JSONResponse({"input_tokens": len(token_ids)}, headers=service.accounting.headers(caller))


def _add_tokenize_routes(app: FastAPI, service: IngressService) -> None:
    @app.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(request: Request, body: JsonBody[TokenizeRequest]) -> Response:
        """The token ids of a text, or of a conversation's prompt."""
        preprocessor, caller = service.preprocessor, inference_principal(request)

        def body_bytes(token_ids: Sequence[int]) -> bytes:
            text_of = preprocessor.tokenizer_of(ref).token_text
            strings = [text_of(token_id) for token_id in token_ids] if body.return_token_strs else None
            fields = {"count": len(token_ids), "max_model_len": preprocessor.max_model_len, "tokens": list(token_ids)}
            return to_json(fields | {"token_strs": strings})

        ref = await preprocessor.resolver.resolve(body.model, caller, body.lora_path)
        async with service.accounting.charge_request(caller, ref):
            if body.prompt is None:
                token_ids = await preprocessor.chat_ids(body, ref, caller)
            else:
                (token_ids,) = await preprocessor.prompt_ids([body.prompt], [ref], "prompt")
            content = await in_worker_if_long(len(token_ids), lambda: body_bytes(token_ids))
        return _json(content, service.accounting.headers(caller))

    @app.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(request: Request, body: JsonBody[DetokenizeRequest]) -> Response:
        """The text of token ids."""
        preprocessor, caller = service.preprocessor, inference_principal(request)
        ref = await preprocessor.resolver.resolve(body.model, caller)
        async with service.accounting.charge_request(caller, ref):
            (token_ids,) = await preprocessor.prompt_ids([body.tokens], [ref], "tokens")
            content = await in_worker_if_long(
                len(token_ids), lambda: to_json({"prompt": preprocessor.text_of(token_ids, ref)})
            )
        return _json(content, service.accounting.headers(caller))


def _json(content: bytes, headers: Mapping[str, str]) -> Response:
    return Response(content, media_type="application/json", headers=headers)
