"""Running a request and sending its response: cancelled when the client disconnects, counted however it ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.error_responses import TABLE, ClientGone, ErrorReply
from app.deployments.ingress.http.event_stream import EventStream, run_until_disconnect
from app.deployments.ingress.http.middleware.request_log import request_id_of
from app.deployments.ingress.principal import inference_principal
from app.deployments.ingress.schemas.openai import ChatCompletionRequest
from app.deployments.ingress.semantic_router.decision import ROUTE_HEADER
from app.deployments.ingress.service import IngressService
from app.engine.errors import InvalidRequest

T = TypeVar("T")

#: How long a replica has to refuse a request before the headers of its stream are sent: a full queue, no rows.
REFUSAL_S = 0.25

#: The adapter that answered as "name@generation" (an alias may have chosen it), and its digest.
ADAPTER_HEADER, DIGEST_HEADER = "X-Polylora-Adapter", "X-Polylora-Adapter-Digest"
#: The parts of JSON schemas without `strict: true` that the answer need not follow.
UNENFORCED_HEADER = "X-Polylora-Unenforced"
_MAX_HEADER = 1000


def answer_headers(service: IngressService, task: GenerationTask) -> dict[str, str]:
    """The headers of an answer: its adapter, the semantic router's decision, parts of schemas that are not enforced,
    and the caller's remaining limits."""
    adapter = task.requests[0].requested_adapter
    headers: dict[str, str] = {}
    if adapter is not None:
        headers = {ADAPTER_HEADER: f"{adapter.name}@{adapter.generation}", DIGEST_HEADER: adapter.digest}
    if task.unenforced:
        headers[UNENFORCED_HEADER] = re.sub(r"[^ -~]", "?", ", ".join(task.unenforced))[:_MAX_HEADER]
    if task.decision is not None:
        headers[ROUTE_HEADER] = task.decision.header
    return headers | service.accounting.headers(task.caller)


@contextmanager
def observe_if_cancelled(service: IngressService, route: str, task: GenerationTask) -> Iterator[None]:
    """Count a request as 499 if Serve cancels its task, as it does on disconnect: no error handler runs then."""
    try:
        yield
    except asyncio.CancelledError:
        service.observe(route, TABLE[ClientGone].status, task)
        raise


async def run_task(
    request: Request, service: IngressService, task: GenerationTask, route: str, work: Awaitable[T]
) -> T:
    """The result of a task's work, counted as a success; if the client disconnects first, counted as 499. What `work`
    raises is counted by the error handlers."""
    with observe_if_cancelled(service, route, task):
        result = await run_until_disconnect(request.receive, work)
    service.observe(route, 200, task)
    return result


async def first_event(
    request: Request, events: AsyncGenerator[bytes], assigned: asyncio.Event
) -> asyncio.Future[bytes]:
    """The first event, which is awaited until shortly after `assigned` only: then the response begins without it.

    Raises an error that is known until then. If the client disconnects before, or the task is cancelled, closes
    `events`.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await run_until_disconnect(request.receive, _wait_until_admitted(first, assigned))
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        raise
    return first


async def _wait_until_admitted(first: asyncio.Future[bytes], assigned: asyncio.Event) -> None:
    first.add_done_callback(lambda _: assigned.set())  # it may fail before
    await assigned.wait()
    await asyncio.wait((first,), timeout=REFUSAL_S)


async def start_task(request: Request, service: IngressService, chat: ChatCompletionRequest) -> GenerationTask:
    """Start a chat. Raises what `RequestPreprocessor.chat` does, with the field names of this route's clients."""
    is_responses = request.url.path.endswith("/responses")
    with responses_field_names() if is_responses else nullcontext():
        task = await service.preprocessor.chat(chat, inference_principal(request), request_id_of(request))
    if is_responses:
        task = replace(task, unenforced=tuple(_responses_field(field) for field in task.unenforced))
    request.state.task, request.state.model = task, chat.model[:160]
    return task


#: Patterns of a chat completion's fields, and their names in /v1/responses.
_RESPONSES_FIELDS = (
    (re.compile(r"^messages$"), "input"),
    (re.compile(r"^max_tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format\.json_schema\.schema\b"), "text.format.schema"),
    (re.compile(r"^(tools\.\d+)\.function\."), r"\1."),
)


def _responses_field(field: str) -> str:
    for pattern, name in _RESPONSES_FIELDS:
        field = pattern.sub(name, field)
    return field


@contextmanager
def responses_field_names() -> Iterator[None]:
    """Errors of a chat completion name the fields of /v1/responses."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            error.param = _responses_field(error.param)
        raise


def json_response(service: IngressService, task: GenerationTask, body: dict[str, Any]) -> Response:
    """A complete JSON answer with its headers."""
    return JSONResponse(body, headers=answer_headers(service, task))


async def stream_response(
    request: Request,
    service: IngressService,
    task: GenerationTask,
    route: str,
    events: AsyncGenerator[bytes],
    as_event: Callable[[ErrorReply], bytes],
) -> Response:
    """A stream of events. An error before the request is admitted is raised, so that the response has its status; a
    later one is the last event, as `as_event` formats it."""
    with observe_if_cancelled(service, route, task):
        first = await first_event(request, events, task.progress.assigned)
    headers = answer_headers(service, task)
    return EventStream(first, events, lambda status: service.observe(route, status, task), headers, b"", as_event)
