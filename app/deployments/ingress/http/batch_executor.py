"""Runs one request of a batch like its HTTP route would, without a connection.

The request goes through the same preprocessor, limits and accounting as one that arrives over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeAlias

from pydantic_core import to_json

from app.deployments.ingress.base_models import BaseModels
from app.deployments.ingress.batches.runner import AnswerLine, is_transient
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.embeddings import answer, vectors
from app.deployments.ingress.error_responses import error_reply
from app.deployments.ingress.http.request_lifecycle import observe_if_cancelled, responses_field_names
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.completions import EmbeddingsRequest
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, CompletionRequest
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.ingress.schemas.responses import ResponsesRequest
from app.deployments.ingress.schemas.scoring import ClassifyRequest, RerankRequest, ScoreRequest
from app.deployments.ingress.scoring import ScoringRequest, scoring_answer
from app.deployments.ingress.serializers.content_blocks import collect_blocks
from app.deployments.ingress.serializers.openai import chat_serializer
from app.deployments.ingress.serializers.responses import response_body
from app.deployments.ingress.service import IngressService
from app.engine.errors import InvalidRequest

_SCORING: Mapping[str, type[ScoringRequest]] = {
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/v1/classify": ClassifyRequest,
}
#: A running request, and the coroutine of its response body.
_StartedRequest: TypeAlias = tuple[GenerationTask, Coroutine[Any, Any, bytes]]


def answer_line(bases: BaseModels) -> AnswerLine:
    """`BatchExecutor.answer` of the base model that each line is for."""
    executors = {service: BatchExecutor(service) for service in bases.services}

    async def answer(endpoint: str, body: Mapping[str, Any], caller: Principal, request_id: str) -> bytes:
        return await executors[bases.of_body(body, caller)].answer(endpoint, body, caller, request_id)

    return answer


class BatchExecutor:
    """Executes the batch lines of one base model."""

    def __init__(self, service: IngressService) -> None:
        self._service = service

    async def answer(self, endpoint: str, body: Mapping[str, Any], caller: Principal, request_id: str) -> bytes:
        """The response body as JSON. Raises whatever the route would turn into an error response."""
        route = endpoint.removeprefix("/v1/").split("/")[0]
        task: GenerationTask | None = None
        try:
            task, result = await self._start(endpoint, body, caller, request_id)
            with observe_if_cancelled(self._service, route, task):
                answer = await result
        except Exception as error:
            if task is not None:
                self._record(task, will_retry=is_transient(error))
            self._service.observe(route, error_reply(error).status, task)
            raise
        self._record(task, will_retry=False)
        self._service.observe(route, 200, task)
        return answer

    def _record(self, task: GenerationTask, *, will_retry: bool) -> None:
        """Count a batch line as one request, however often it is retried."""
        if will_retry:
            self._service.accounting.requeue(task)
        else:
            self._service.accounting.usage_recorder.record_request(task.requests[0])

    async def _start(
        self, endpoint: str, body: Mapping[str, Any], caller: Principal, request_id: str
    ) -> _StartedRequest:
        preprocessor = self._service.preprocessor
        if endpoint == "/v1/chat/completions":
            chat = await asyncio.to_thread(parse_body, ChatCompletionRequest, body)
            task = await preprocessor.chat(chat, caller, request_id)
            return task, self._completion(chat, task)
        if endpoint == "/v1/completions":
            completion = await asyncio.to_thread(parse_body, CompletionRequest, body)
            task = await preprocessor.completion(completion, caller, request_id)
            return task, self._completion(completion, task)
        if endpoint == "/v1/embeddings":
            embeddings = await asyncio.to_thread(parse_body, EmbeddingsRequest, body)
            task = await self._service.embedder.task(embeddings, caller, request_id)
            return task, self._embedding(embeddings, task)
        if endpoint in _SCORING:
            scoring = await asyncio.to_thread(parse_body, _SCORING[endpoint], body)
            task = await self._service.scorer.task(scoring, caller, request_id)
            return task, scoring_answer(task, scoring, self._service.accounting.clock())
        response = await asyncio.to_thread(parse_body, ResponsesRequest, body)
        for field in ("store", "previous_response_id"):
            if getattr(response, field):
                raise InvalidRequest(
                    f"{field} is not allowed in a batch, whose output file holds the answers; leave it out", param=field
                )
        with responses_field_names():
            task = await preprocessor.chat(await asyncio.to_thread(response.chat), caller, request_id)
        return task, self._response(response, task)

    async def _completion(self, body: ChatCompletionRequest | CompletionRequest, task: GenerationTask) -> bytes:
        serializer = chat_serializer(body, task)
        return await serializer.content(await task.answers(), task.num_per_prompt)

    async def _embedding(self, body: EmbeddingsRequest, task: GenerationTask) -> bytes:
        return await answer(task, body, await vectors(task))

    async def _response(self, body: ResponsesRequest, task: GenerationTask) -> bytes:
        return to_json(response_body(task, body, *await collect_blocks(task)))
