"""The HTTP surface: routes, bodies, streams and nothing else.

In: an `HttpService` (the ingress). Out: a FastAPI application. Bodies are read with a limit and parsed
strictly; every error leaves through `status`. The first event of a stream is waited for before
the status line is sent, so that a refused request has its proper code. A client that goes away cancels
its work, streaming or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.deployments.ingress.body import parse_body
from app.deployments.ingress.embeddings import Embedder, EmbeddingsRequest, answer, vectors
from app.deployments.ingress.frontend import last_words
from app.deployments.ingress.http.about_routes import AboutService, add_about_routes
from app.deployments.ingress.http.admin_routes import admin_router
from app.deployments.ingress.http.agent_routes import add_agent_routes
from app.deployments.ingress.http.answers import AnswerFormat, TokenOffsets
from app.deployments.ingress.http.batch_routes import KeepingService, add_batch_routes
from app.deployments.ingress.http.bodies import MAX_PAGE, PageQuery, page_body, page_query, read_json
from app.deployments.ingress.http.door import Door, Gate
from app.deployments.ingress.http.event_stream import EventStream, sse
from app.deployments.ingress.http.file_routes import add_file_routes
from app.deployments.ingress.http.formats import answer_format
from app.deployments.ingress.http.guard import DoorRules, Guard
from app.deployments.ingress.http.managed import ManagedService
from app.deployments.ingress.http.management_routes import add_management_routes
from app.deployments.ingress.http.messages_answers import body_told
from app.deployments.ingress.http.openapi import EVENTS, JSON, api_routes, takes
from app.deployments.ingress.http.query import check_query
from app.deployments.ingress.http.request_log import RequestLog, note_failure, request_id_of
from app.deployments.ingress.http.running import adapter_header, counted_if_cancelled, first_event, while_connected
from app.deployments.ingress.http.upload_routes import add_upload_route
from app.deployments.ingress.job import Job
from app.deployments.ingress.results import generate_result
from app.deployments.ingress.routing.decision import ROUTE_HEADER
from app.deployments.ingress.schema import ChatCompletionRequest, CompletionRequest, GenerateBody, RouteBody
from app.deployments.ingress.status import ErrorAnswer, error_answer
from app.deployments.ingress.tenancy import Tenancy
from app.deployments.ingress.tenants import Caller, http_caller, inference_caller, visible, visible_page
from app.deployments.registry.entries import DEFAULT_TENANT, AliasEntry
from app.deployments.registry.view import Entry
from app.deployments.tenants.limits import LimitReached
from app.engine.adapters.composing.composition import is_composition
from app.engine.errors import InvalidRequest, NotFound, PolyloraError
from app.redaction import without_keys


class HttpService(ManagedService, AboutService, KeepingService, Protocol):
    """What the routes need of the ingress."""

    @property
    def tenancy(self) -> Tenancy: ...

    @property
    def embedder(self) -> Embedder: ...

    def observe(self, route: str, status: int, job: Job | None) -> None: ...


def make_app(service: HttpService, rules: DoorRules, *, log_requests: bool = False) -> FastAPI:
    """All routes over one service, for those whom the rules let in. log_requests: write each request down."""
    app = FastAPI(
        title="polylora",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(check_query)],
    )
    app.add_middleware(Door, gate=Gate(service.tenancy, rules))  # innermost: the last one added is the first asked
    app.add_middleware(_WithoutLastSlash)
    app.add_middleware(_HeadAsGet)
    if rules.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=rules.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Guard, rules=rules)
    app.add_middleware(RequestLog, every=log_requests)

    async def refuse(request: Request, error: Exception) -> Response:
        answer = error_answer(error)
        if answer.status >= 500:
            note_failure(request, answer.body["error"]["message"])
        path: str = getattr(request.scope.get("route"), "path", "/none")  # as declared: names are not filled in
        route = path.removeprefix("/v1").split("/")[1]
        service.observe(route, answer.status, getattr(request.state, "job", None))
        headers = service.tenancy.headers(http_caller(request)) if isinstance(error, LimitReached) else {}
        body = body_told(answer, request.scope["path"])
        return JSONResponse(body, status_code=answer.status, headers=headers | answer.headers)

    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, refuse)
    app.add_exception_handler(PolyloraError, refuse)
    _add_openai_routes(app, service)
    _add_generate_route(app, service)
    add_agent_routes(app, service)
    _add_embeddings_route(app, service)
    _add_choice_route(app, service)
    add_file_routes(app, service)
    add_batch_routes(app, service)
    management = APIRouter(dependencies=[Depends(rules.check_management)])
    add_management_routes(management, service)
    add_upload_route(management, service)
    app.include_router(management)
    app.include_router(admin_router(service))
    add_about_routes(app, service)
    return app


def _add_openai_routes(app: FastAPI, service: HttpService) -> None:
    @app.get("/v1/models", openapi_extra=takes(None, "limit", "after", told="ModelList"))
    async def models(request: Request) -> Response:
        """The base model, adapters and aliases: all of them, or a page."""
        caller = http_caller(request)
        if "limit" in request.query_params:
            return JSONResponse(model_page(service, page_query(request), caller))
        pages = all_models(service, request.query_params.get("after"), caller)
        return StreamingResponse(pages, media_type="application/json")

    @app.get("/v1/models/{name}", openapi_extra=takes(told="Model"))
    async def model(request: Request, name: str) -> Response:
        """One of them."""
        entry = visible(service.registry, http_caller(request), name.removeprefix(f"{service.base_name}:"))
        if entry is not None:
            return JSONResponse(model_of(service, entry, http_caller(request)))
        if name == service.base_name and http_caller(request).tenant.may_use(name):
            return JSONResponse(base_model(service))
        raise NotFound(f"there is no model or adapter {name[:80]!r}; GET /v1/models lists what there is")

    @app.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatCompletionRequest, answers=(JSON, EVENTS), told="ChatCompletion"),
    )
    async def chat(request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        body = parse_body(ChatCompletionRequest, await read_json(request, service.frontend.limits.max_body_bytes))
        job = await service.frontend.chat(body, inference_caller(request), request_id_of(request))
        return await _respond(request, service, body, job)

    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest, answers=(JSON, EVENTS), told="Completion"))
    async def completions(request: Request) -> Response:
        """Continue one text or several, whole or as a stream."""
        body = parse_body(CompletionRequest, await read_json(request, service.frontend.limits.max_body_bytes))
        job = await service.frontend.completion(body, inference_caller(request), request_id_of(request))
        return await _respond(request, service, body, job)


async def _respond(
    request: Request, service: HttpService, body: ChatCompletionRequest | CompletionRequest, job: Job
) -> Response:
    request.state.job = job
    request.state.model = body.model[:160]
    route = "chat" if isinstance(body, ChatCompletionRequest) else "completions"
    form = answer_format(service.frontend.text_model, body, job)
    headers = adapter_header(job) | service.tenancy.headers(job.caller)
    if not body.stream:
        with counted_if_cancelled(service, route, job):
            answers = await while_connected(request, job.answers())
        service.observe(route, 200, job)
        return JSONResponse(form.body(answers, job.num_per_prompt), headers=headers)
    events = _events(job, form)
    with counted_if_cancelled(service, route, job):
        first = await first_event(request, events)
    return EventStream(first, events, lambda status: service.observe(route, status, job), headers)


def _add_embeddings_route(app: FastAPI, service: HttpService) -> None:
    @app.post("/v1/embeddings", openapi_extra=takes(EmbeddingsRequest, told="Embeddings"))
    async def embeddings(request: Request) -> Response:
        body = parse_body(EmbeddingsRequest, await read_json(request, service.frontend.limits.max_body_bytes))
        caller, request_id = inference_caller(request), request_id_of(request)
        job = request.state.job = await service.embedder.job(body, caller, request_id)
        with counted_if_cancelled(service, "embeddings", job):
            found = await while_connected(request, vectors(job))
        service.observe("embeddings", 200, job)
        headers = adapter_header(job) | service.tenancy.headers(caller)
        return Response(answer(job, body, found), media_type="application/json", headers=headers)


def _add_choice_route(app: FastAPI, service: HttpService) -> None:
    @app.post("/v1/route", openapi_extra=takes(RouteBody))
    async def route(request: Request) -> Response:
        """Which adapters model "auto" would choose, and how near each is; nothing is generated."""
        body = parse_body(RouteBody, await read_json(request, service.frontend.limits.max_body_bytes))
        if (body.messages is None) == (body.prompt is None):
            raise InvalidRequest("give either messages, a conversation, or prompt", param="prompt")
        asked = body.prompt or "" if body.messages is None else last_words(body.messages)
        caller = inference_caller(request)
        decision = await while_connected(request, service.frontend.chooser.choose(asked, caller, body.routing))
        service.observe("route", 200, None)
        headers = {ROUTE_HEADER: decision.header} | service.tenancy.headers(caller)
        return JSONResponse({"object": "route"} | decision.body(), headers=headers)


async def _events(job: Job, form: AnswerFormat) -> AsyncGenerator[bytes]:
    offsets = [TokenOffsets(form.text_bytes) for _ in job.requests]
    started = [not form.is_chat] * len(job.requests)
    readers = [form.reader(index) for index in range(len(job.requests))]
    texts = [form.text_event(index) for index in range(len(job.requests))]
    async with aclosing(job.deltas()) as deltas:
        async for index, delta in deltas:
            reader = readers[index]
            if reader is not None:
                event = b"".join(map(sse, form.tool_events(index, delta, offsets[index], reader)))
            elif started[index] and delta.finish_reason is None and form.is_plain:
                before, behind = texts[index]  # nearly every event: only its text is new
                event = b"data: %b%b%b\n\n" % (before, to_json(delta.text), behind)
            else:
                event = sse(form.event(index, delta, offsets[index]))
            if not started[index]:
                started[index] = True
                event = sse(form.role_event(index)) + event
            if event:
                yield event
    if form.include_usage:
        yield sse(form.usage_event(job.usages, job.num_per_prompt))


def _add_generate_route(app: FastAPI, service: HttpService) -> None:
    @app.post("/generate", openapi_extra=takes(GenerateBody, told="Results"))
    async def generate(request: Request) -> Response:
        """Continue texts, each with an adapter of its own or none."""
        body = parse_body(GenerateBody, await read_json(request, service.frontend.limits.max_body_bytes))
        caller, request_id = inference_caller(request), request_id_of(request)
        job = request.state.job = await service.frontend.generate(body, caller, request_id)
        with counted_if_cancelled(service, "generate", job):
            answers = await while_connected(request, job.answers())
        service.observe("generate", 200, job)
        results = [generate_result(job, index, answer) for index, answer in enumerate(answers)]
        is_single = isinstance(body.text, str) and body.sampling_params.n == 1
        return JSONResponse(results[0] if is_single else results, headers=service.tenancy.headers(caller))


def model_page(service: HttpService, page: PageQuery, caller: Caller) -> dict[str, Any]:
    """The base, then adapters and aliases by name: those that the caller may use."""
    data = [base_model(service)] if page.after is None and caller.tenant.may_use(service.base_name) else []
    after = None if page.after == service.base_name else page.after
    found = visible_page(service.registry, caller, limit=page.limit - len(data), after=after)
    data += [model_of(service, entry, caller) for entry in found.entries]
    return page_body(data, has_more=found.has_more)


async def all_models(service: HttpService, after: str | None, caller: Caller) -> AsyncGenerator[bytes]:
    """The JSON of `model_page`'s list without an end: the official client takes one page for all there are.

    Other requests go on between its parts.
    """
    begin, last_id, first_id = b'{"object":"list","data":[', None, None
    while True:
        page = model_page(service, PageQuery(MAX_PAGE, after), caller)
        if page["data"]:
            first_id, last_id = first_id or page["first_id"], page["last_id"]
            yield begin + to_json(page["data"])[1:-1]
            begin = b","
        if not page["has_more"]:
            break
        after = last_id
        await asyncio.sleep(0)
    yield (b"" if last_id else begin) + b'],"first_id":%b,"last_id":%b,"has_more":false}' % (
        to_json(first_id),
        to_json(last_id),
    )


def base_model(service: HttpService) -> dict[str, Any]:
    return {
        "id": service.base_name,
        "object": "model",
        "created": 0,
        "owned_by": "polylora",
        "root": service.base_name,
        "parent": None,
        "max_model_len": service.frontend.max_context,
    }


def model_of(service: HttpService, entry: Entry, caller: Caller) -> dict[str, Any]:
    """As vLLM lists them: `parent` is the base; `root` is an alias's main target, or where an adapter comes from.

    An adapter that is activated says by which tokens. A place on this server is no client's business, nor is where
    another tenant's adapter comes from, or what its alias stands for: their root is their name.
    """
    activation = {}
    if isinstance(entry, AliasEntry):
        created, root = entry.updated_s, entry.name
        if entry.tenant_id in (caller.tenant_id, DEFAULT_TENANT):
            root = max(entry.targets, key=lambda target: target.weight).name
    else:
        is_told = "://" in entry.source and not is_composition(entry.source) and entry.tenant_id == caller.tenant_id
        created, root = entry.registered_s, entry.source if is_told else entry.name
        if entry.invocation_tokens:
            activation = {"alora_invocation_tokens": [*entry.invocation_tokens]}
    return {
        "id": entry.name,
        "object": "model",
        "created": int(created),
        "owned_by": "polylora",
        "root": root,
        "parent": service.base_name,
        **activation,
    }


class _WithoutLastSlash:
    """`/v1/models/` is `/v1/models`. A redirect would send clients, with what they ask, to this process's own idea of
    its address: http:// behind a proxy that ends TLS.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/":
            scope["path"] = scope["path"].rstrip("/")
        await self._app(scope, receive, send)


class _HeadAsGet:
    """HEAD is what GET is, without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


_WHAT_THERE_IS = (
    "requests go to POST /v1/chat/completions, /v1/completions, /v1/embeddings or /generate, GET /v1/models lists "
    "models and adapters, GET /openapi.json has every route"
)
#: What other servers have here.
_ELSEWHERE = {
    "/metrics": "Prometheus finds metrics on the port of Ray's agent, on every node: docs/reference/metrics.md; "
    "GET /v1/status has counts of the moment"
}


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such route, wrong method) in the shape of every other error."""
    assert isinstance(error, HTTPException), "registered for it"
    path = without_keys(request.url.path)[:80]
    headers = dict(error.headers or {})
    if error.status_code == 405:  # Starlette names the methods of the first route of this path alone
        headers["Allow"] = ", ".join(_methods(request))
    message = {
        404: f"there is nothing at {path!r}; {_ELSEWHERE.get(path, _WHAT_THERE_IS)}",
        405: f"{path!r} does not take {request.method}, only {headers.get('Allow')}",
    }.get(error.status_code, error.detail)
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "no_route"}}
    told = body_told(ErrorAnswer(error.status_code, body, {}), request.scope["path"])
    return JSONResponse(told, status_code=error.status_code, headers=headers)


def _methods(request: Request) -> list[str]:
    """What the path of a request takes."""
    found = {
        method
        for route in api_routes(request.app.routes)
        if route.path_regex.match(request.scope["path"])
        for method in route.methods or ()
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))
