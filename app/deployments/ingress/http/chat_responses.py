"""A conversation as a job, and its answer to a client: what routes for agents have in common.

In: a chat completion that means a request of theirs. Out: its job, and responses that are counted once. Rule: errors
name fields as the route's clients call them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.http.event_stream import EventStream
from app.deployments.ingress.http.middleware.request_log import request_id_of
from app.deployments.ingress.http.request_lifecycle import adapter_header, first_event, observe_if_cancelled
from app.deployments.ingress.principal import inference_principal
from app.deployments.ingress.schemas.openai import ChatCompletionRequest
from app.deployments.ingress.serializers.messages import error_event
from app.deployments.ingress.service import IngressService
from app.engine.errors import InvalidRequest


async def start_task(request: Request, service: IngressService, chat: ChatCompletionRequest) -> GenerationTask:
    """The job of a conversation. Raises what `RequestPreprocessor.chat` does, with fields as this route's clients call them."""
    try:
        job = await service.frontend.chat(chat, inference_principal(request), request_id_of(request))
    except InvalidRequest as error:
        if request.url.path.endswith("/responses") and error.param is not None:
            error.param = _RESPONSES_NAMES.get(error.param, error.param)
        raise
    request.state.job, request.state.model = job, chat.model[:160]
    return job


#: What /v1/responses calls fields of a chat completion.
_RESPONSES_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
}


def json_response(service: IngressService, job: GenerationTask, route: str, body: dict[str, Any]) -> Response:
    """A whole answer, counted."""
    service.observe(route, 200, job)
    return JSONResponse(body, headers=adapter_header(job) | service.tenancy.headers(job.caller))


async def stream_response(
    request: Request, service: IngressService, job: GenerationTask, route: str, events: AsyncGenerator[bytes]
) -> Response:
    """A stream; what is refused before its first event is raised."""
    with observe_if_cancelled(service, route, job):
        first = await first_event(request, events)
    headers = adapter_header(job) | service.tenancy.headers(job.caller)
    return EventStream(first, events, lambda status: service.observe(route, status, job), headers, b"", error_event)
