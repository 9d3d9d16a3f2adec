"""Chat completions, completions, embeddings and adapter selection in OpenAI's format, and SGLang's /generate.

The first event of a stream is awaited before the status line is sent, so that a rejected request has its status code.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.embeddings import answer, vectors
from app.deployments.ingress.http.event_stream import EventStream, run_until_disconnect
from app.deployments.ingress.http.middleware.request_log import request_id_of
from app.deployments.ingress.http.openapi import EVENT_STREAM
from app.deployments.ingress.http.request_lifecycle import (
    answer_headers,
    first_event,
    observe_if_cancelled,
    run_task,
)
from app.deployments.ingress.http.request_parsing import JsonBody
from app.deployments.ingress.preprocess.preprocessor import last_user_text
from app.deployments.ingress.principal import inference_principal
from app.deployments.ingress.schemas.completions import (
    ChatCompletion,
    Completion,
    EmbeddingList,
    EmbeddingsRequest,
    GenerateResult,
    RouteDecision,
)
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, CompletionRequest, GenerateBody, RouteBody
from app.deployments.ingress.semantic_router.decision import ROUTE_HEADER
from app.deployments.ingress.serializers.completion_events import completion_events
from app.deployments.ingress.serializers.generate import generate_result
from app.deployments.ingress.serializers.openai import chat_serializer
from app.deployments.ingress.service import IngressService
from app.engine.errors import InvalidRequest


def add_openai_routes(app: FastAPI, service: IngressService) -> None:
    _add_completion_routes(app, service)
    _add_generate_route(app, service)
    _add_embeddings_route(app, service)
    _add_selection_route(app, service)


def _add_completion_routes(app: FastAPI, service: IngressService) -> None:
    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=EVENT_STREAM)
    async def chat(request: Request, body: JsonBody[ChatCompletionRequest]) -> Response:
        """Answer a conversation, complete or as a stream."""
        task = await service.preprocessor.chat(body, inference_principal(request), request_id_of(request))
        return await _respond(request, service, body, task)

    @app.post("/v1/completions", response_model=Completion, responses=EVENT_STREAM)
    async def completions(request: Request, body: JsonBody[CompletionRequest]) -> Response:
        """Continue one or more prompts, complete or as a stream."""
        task = await service.preprocessor.completion(body, inference_principal(request), request_id_of(request))
        return await _respond(request, service, body, task)


async def _respond(
    request: Request, service: IngressService, body: ChatCompletionRequest | CompletionRequest, task: GenerationTask
) -> Response:
    request.state.task = task
    request.state.model = body.model[:160]
    route = "chat" if isinstance(body, ChatCompletionRequest) else "completions"
    serializer = chat_serializer(body, task)
    headers = answer_headers(service, task)
    if not body.stream:

        async def content() -> bytes:
            return await serializer.content(await task.answers(), task.num_per_prompt)

        found = await run_task(request, service, task, route, content())
        return Response(found, media_type="application/json", headers=headers)
    events = completion_events(task, serializer)
    with observe_if_cancelled(service, route, task):
        first = await first_event(request, events, task.progress.assigned)
    return EventStream(first, events, lambda status: service.observe(route, status, task), headers)


def _add_embeddings_route(app: FastAPI, service: IngressService) -> None:
    @app.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(request: Request, body: JsonBody[EmbeddingsRequest]) -> Response:
        """Embed texts."""
        caller, request_id = inference_principal(request), request_id_of(request)
        task = request.state.task = await service.embedder.task(body, caller, request_id)

        async def content() -> bytes:
            return await answer(task, body, await vectors(task))

        found = await run_task(request, service, task, "embeddings", content())
        return Response(found, media_type="application/json", headers=answer_headers(service, task))


def _add_selection_route(app: FastAPI, service: IngressService) -> None:
    @app.post("/v1/route", response_model=RouteDecision)
    async def route(request: Request, body: JsonBody[RouteBody]) -> Response:
        """The adapters that model "auto" would choose, and their scores; generates nothing."""
        if (body.messages is None) == (body.prompt is None):
            raise InvalidRequest("give either messages, a conversation, or prompt", param="prompt")
        question = body.prompt or "" if body.messages is None else last_user_text(body.messages)
        caller = inference_principal(request)
        decision = await run_until_disconnect(
            request.receive, service.preprocessor.semantic_router.choose(question, caller, body.routing)
        )
        service.observe("route", 200, None)
        headers = {ROUTE_HEADER: decision.header} | service.accounting.headers(caller)
        return JSONResponse({"object": "route"} | decision.body(), headers=headers)


def _add_generate_route(app: FastAPI, service: IngressService) -> None:
    @app.post("/generate", response_model=GenerateResult | list[GenerateResult])
    async def generate(request: Request, body: JsonBody[GenerateBody]) -> Response:
        """Continue texts, each with its own adapter or none."""
        caller, request_id = inference_principal(request), request_id_of(request)
        task = request.state.task = await service.preprocessor.generate(body, caller, request_id)
        answers = await run_task(request, service, task, "generate", task.answers())
        results = [generate_result(task, index, answer) for index, answer in enumerate(answers)]
        is_single = isinstance(body.text, str) and body.sampling_params.n == 1
        return JSONResponse(results[0] if is_single else results, headers=service.accounting.headers(caller))
