"""A request of a batch, answered as its route answers it, without a connection.

In: a route's path, a body, who asks. Out: the body of the answer. Rule: nothing is another request's: it goes through
the same frontend, and is let in, limited, counted and metered as one that came over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from app.deployments.ingress.batches.runner import is_passing
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.embeddings import answer, vectors
from app.deployments.ingress.error_responses import error_reply
from app.deployments.ingress.http.request_lifecycle import counted_if_cancelled
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.embeddings import EmbeddingsRequest
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, CompletionRequest
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.ingress.schemas.responses import ResponsesRequest
from app.deployments.ingress.serializers.content_blocks import finished
from app.deployments.ingress.serializers.openai import chat_serializer
from app.deployments.ingress.serializers.responses import response_body
from app.deployments.ingress.service import IngressService
from app.engine.errors import InvalidRequest

#: A request that runs, and what waits for its answer.
_Begun: TypeAlias = tuple[GenerationTask, Callable[[], Awaitable[dict[str, Any]]]]


class BatchExecutor:
    """One per ingress."""

    def __init__(self, service: IngressService) -> None:
        self._service = service

    async def answer(
        self, endpoint: str, body: Mapping[str, Any], caller: Principal, request_id: str
    ) -> Mapping[str, Any]:
        """Raises what the route tells as an error."""
        route = endpoint.removeprefix("/v1/").split("/")[0]
        job: GenerationTask | None = None
        try:
            job, told = await self._begun(endpoint, body, caller, request_id)
            with counted_if_cancelled(self._service, route, job):
                answer = await told()
        except Exception as error:
            if job is not None:
                self._came(job, is_passing=is_passing(error))
            self._service.observe(route, error_reply(error).status, job)
            raise
        self._came(job, is_passing=False)
        self._service.observe(route, 200, job)
        return answer

    def _came(self, job: GenerationTask, *, is_passing: bool) -> None:
        """A line is one request, however often it is tried."""
        if is_passing:
            self._service.tenancy.comes_again(job)
        else:
            self._service.tenancy.counting.record_request(job.requests[0])

    async def _begun(self, endpoint: str, body: Mapping[str, Any], caller: Principal, request_id: str) -> _Begun:
        frontend = self._service.frontend
        if endpoint == "/v1/chat/completions":
            chat = parse_body(ChatCompletionRequest, body)
            return self._completion(chat, await frontend.chat(chat, caller, request_id))
        if endpoint == "/v1/completions":
            completion = parse_body(CompletionRequest, body)
            return self._completion(completion, await frontend.completion(completion, caller, request_id))
        if endpoint == "/v1/embeddings":
            return await self._embedding(parse_body(EmbeddingsRequest, body), caller, request_id)
        return await self._response(parse_body(ResponsesRequest, body), caller, request_id)

    def _completion(self, body: ChatCompletionRequest | CompletionRequest, job: GenerationTask) -> _Begun:
        async def told() -> dict[str, Any]:
            form = chat_serializer(self._service.frontend.text_model, body, job)
            return form.body(await job.answers(), job.num_per_prompt)

        return job, told

    async def _embedding(self, body: EmbeddingsRequest, caller: Principal, request_id: str) -> _Begun:
        job = await self._service.embedder.job(body, caller, request_id)

        async def told() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(answer(job, body, await vectors(job)))
            return found

        return job, told

    async def _response(self, body: ResponsesRequest, caller: Principal, request_id: str) -> _Begun:
        for field in ("store", "previous_response_id"):
            if getattr(body, field):
                raise InvalidRequest(
                    f"{field} is not for requests of a batch, whose answers are its output", param=field
                )
        job = await self._service.frontend.chat(body.chat(), caller, request_id)

        async def told() -> dict[str, Any]:
            blocks, end = await finished(job)
            return response_body(job, body, blocks, end)

        return job, told
