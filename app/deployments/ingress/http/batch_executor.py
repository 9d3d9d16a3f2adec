"""Runs one request of a batch like its HTTP route would, without a connection.

The request goes through the same preprocessor, limits and accounting as one that arrives over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeAlias

from app.deployments.ingress.batches.runner import is_transient
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.embeddings import answer, vectors
from app.deployments.ingress.error_responses import error_reply
from app.deployments.ingress.http.request_lifecycle import observe_if_cancelled
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.completions import EmbeddingsRequest
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, CompletionRequest
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.ingress.schemas.responses import ResponsesRequest
from app.deployments.ingress.serializers.content_blocks import collect_blocks
from app.deployments.ingress.serializers.openai import chat_serializer
from app.deployments.ingress.serializers.responses import response_body
from app.deployments.ingress.service import IngressService
from app.engine.errors import InvalidRequest

#: A running request, and the coroutine of its response body.
_StartedRequest: TypeAlias = tuple[GenerationTask, Coroutine[Any, Any, dict[str, Any]]]


class BatchExecutor:
    """Executes batch lines; one per ingress."""

    def __init__(self, service: IngressService) -> None:
        self._service = service

    async def answer(
        self, endpoint: str, body: Mapping[str, Any], caller: Principal, request_id: str
    ) -> Mapping[str, Any]:
        """The response body. Raises whatever the route would turn into an error response."""
        route = endpoint.removeprefix("/v1/").split("/")[0]
        job: GenerationTask | None = None
        try:
            job, result = await self._start(endpoint, body, caller, request_id)
            with observe_if_cancelled(self._service, route, job):
                answer = await result
        except Exception as error:
            if job is not None:
                self._record(job, is_passing=is_transient(error))
            self._service.observe(route, error_reply(error).status, job)
            raise
        self._record(job, is_passing=False)
        self._service.observe(route, 200, job)
        return answer

    def _record(self, job: GenerationTask, *, is_passing: bool) -> None:
        """Count a batch line as one request, however often it is retried."""
        if is_passing:
            self._service.tenancy.comes_again(job)
        else:
            self._service.tenancy.counting.came(job.requests[0])

    async def _start(
        self, endpoint: str, body: Mapping[str, Any], caller: Principal, request_id: str
    ) -> _StartedRequest:
        frontend = self._service.frontend
        if endpoint == "/v1/chat/completions":
            chat = parse_body(ChatCompletionRequest, body)
            job = await frontend.chat(chat, caller, request_id)
            return job, self._completion(chat, job)
        if endpoint == "/v1/completions":
            completion = parse_body(CompletionRequest, body)
            job = await frontend.completion(completion, caller, request_id)
            return job, self._completion(completion, job)
        if endpoint == "/v1/embeddings":
            embeddings = parse_body(EmbeddingsRequest, body)
            job = await self._service.embedder.job(embeddings, caller, request_id)
            return job, self._embedding(embeddings, job)
        response = parse_body(ResponsesRequest, body)
        for field in ("store", "previous_response_id"):
            if getattr(response, field):
                raise InvalidRequest(
                    f"{field} is not allowed in a batch, whose output file holds the answers; leave it out", param=field
                )
        job = await frontend.chat(response.chat(), caller, request_id)
        return job, self._response(response, job)

    async def _completion(self, body: ChatCompletionRequest | CompletionRequest, job: GenerationTask) -> dict[str, Any]:
        serializer = chat_serializer(self._service.frontend.text_model, body, job)
        return serializer.body(await job.answers(), job.num_per_prompt)

    async def _embedding(self, body: EmbeddingsRequest, job: GenerationTask) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(answer(job, body, await vectors(job)))
        return content

    async def _response(self, body: ResponsesRequest, job: GenerationTask) -> dict[str, Any]:
        return response_body(job, body, *await collect_blocks(job))
