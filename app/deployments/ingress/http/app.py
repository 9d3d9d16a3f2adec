"""The HTTP application: middleware, routes, and one handler for each family of errors.

Bodies are read with a limit and parsed strictly; every error becomes a response in `error_responses`. A client that
disconnects cancels its work, streaming or not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, partial

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.convertors import register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.deployments.ingress.base_models import BaseModels
from app.deployments.ingress.error_responses import ErrorReply, error_reply
from app.deployments.ingress.http.base_router import BaseRouter
from app.deployments.ingress.http.middleware.auth import Authenticator, AuthMiddleware
from app.deployments.ingress.http.middleware.metering import MeteringMiddleware
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy, OriginCheckMiddleware, is_console
from app.deployments.ingress.http.middleware.request_log import PROBES, SEND_BODY, RequestLogMiddleware, note_failure
from app.deployments.ingress.http.middleware.sessions import ConsoleSessions
from app.deployments.ingress.http.openapi import flat_routes, openapi, operation_id
from app.deployments.ingress.http.request_parsing import (
    DirectRoute,
    NameConvertor,
    check_query,
    invalid_query,
    read_unused_body,
)
from app.deployments.ingress.http.routes.admin import admin_router
from app.deployments.ingress.http.routes.aliases import add_alias_routes
from app.deployments.ingress.http.routes.audit import add_audit_routes
from app.deployments.ingress.http.routes.batches import add_batch_routes
from app.deployments.ingress.http.routes.compat import add_compat_routes
from app.deployments.ingress.http.routes.console import add_console_routes
from app.deployments.ingress.http.routes.files import add_file_routes
from app.deployments.ingress.http.routes.health import add_health_routes
from app.deployments.ingress.http.routes.loras import add_adapter_routes
from app.deployments.ingress.http.routes.messages import add_messages_routes
from app.deployments.ingress.http.routes.models import add_model_routes
from app.deployments.ingress.http.routes.openai import add_openai_routes
from app.deployments.ingress.http.routes.overview import add_overview_routes
from app.deployments.ingress.http.routes.responses import add_response_routes
from app.deployments.ingress.http.routes.scoring import add_scoring_routes
from app.deployments.ingress.principal import http_principal
from app.deployments.ingress.schemas.response_model import ErrorResponse
from app.deployments.ingress.serializers.messages import error_body_for
from app.deployments.ingress.service import IngressService
from app.deployments.ingress.tracing import RequestTracer
from app.deployments.tenancy.quota.address_limiter import AddressLimiter
from app.deployments.tenancy.quota.limits import LimitError
from app.engine.errors import PolyloraError
from app.redaction import without_keys


def make_app(
    service: IngressService, policy: HttpPolicy, *, log_requests: bool = False, others: Sequence[IngressService] = ()
) -> FastAPI:
    """The application over one service. `log_requests`: log every request, not only failures. `others`: the services of
    further base models, which only get the requests that are for them."""
    bases = BaseModels((service, *others))
    addresses = AddressLimiter(service.new_project_limits.calls_per_min, time.monotonic)
    sessions = ConsoleSessions(
        service.accounting.tenants_service.session_secret,
        service.accounting.view,
        service.accounting.clock,
        policy.admin_digest,
    )
    app = _base_app(service, bases, policy, sessions)
    router = None
    if others:
        router = BaseRouter(bases, [_base_app(each, bases, policy, sessions) for each in others])
    # Starlette runs the middleware that was added last first.
    app.add_middleware(MeteringMiddleware, service=service, policy=policy, addresses=addresses, router=router)
    authenticator = Authenticator(service.accounting, policy)
    app.add_middleware(AuthMiddleware, authenticator=authenticator, sessions=sessions, addresses=addresses)
    app.add_middleware(StripTrailingSlash)
    app.add_middleware(HeadAsGet)
    if policy.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=policy.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],  # browsers hide Retry-After, X-Request-ID, x-ratelimit-* and X-Polylora-* otherwise
        )
    app.add_middleware(OriginCheckMiddleware, policy=policy)
    if service.tracer is not None:
        app.add_middleware(TracingMiddleware, tracer=service.tracer)
    app.add_middleware(RequestLogMiddleware, every=log_requests)
    return app


def _base_app(service: IngressService, bases: BaseModels, policy: HttpPolicy, sessions: ConsoleSessions) -> FastAPI:
    """One base model's routes and error handlers. `bases`: all of this ingress."""
    register_url_convertor("model", NameConvertor())
    app = FastAPI(
        title="polylora",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        dependencies=[Depends(check_query), Depends(read_unused_body)],
        responses={"default": {"model": ErrorResponse}},
        generate_unique_id_function=operation_id,
    )
    app.router.route_class = DirectRoute
    app.state.service = service  # for `JsonBody`
    app.openapi = cache(partial(openapi, app))  # type: ignore[method-assign]

    async def refuse(request: Request, error: Exception) -> Response:
        answer = error_reply(error)
        if answer.status >= 500:
            note_failure(request, answer.body["error"]["message"])
        path: str = getattr(request.scope.get("route"), "path", "/none")  # the template, without values
        route = path.removeprefix("/v1").split("/")[1]
        service.observe(route, answer.status, getattr(request.state, "task", None))
        headers = service.accounting.headers(http_principal(request)) if isinstance(error, LimitError) else {}
        body = error_body_for(answer, request.scope["path"])
        return JSONResponse(body, status_code=answer.status, headers=headers | answer.headers)

    async def refuse_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for it"
        return await refuse(request, invalid_query(error))

    app.add_exception_handler(RequestValidationError, refuse_query)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, refuse)
    app.add_exception_handler(PolyloraError, refuse)
    add_model_routes(app, bases)
    add_openai_routes(app, service)
    add_scoring_routes(app, service)
    add_messages_routes(app, service)
    add_response_routes(app, service)
    add_file_routes(app, service)
    add_batch_routes(app, service)
    management = APIRouter(dependencies=[Depends(policy.check_management)])
    add_compat_routes(management, service)
    add_adapter_routes(management, service)
    add_audit_routes(management, service, bases)
    add_alias_routes(management, service)
    add_overview_routes(management, service, bases)
    app.include_router(management)
    app.include_router(admin_router(service))
    add_health_routes(app, bases)
    if policy.console:
        add_console_routes(app, service, policy, sessions)
    return app


_ROUTE_HINT = (
    "requests go to POST /v1/chat/completions, /v1/completions, /v1/embeddings or /generate, GET /v1/models lists "
    "models and adapters, GET /openapi.json has every route"
)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own errors (no such route, wrong method) in the format of every other error."""
    assert isinstance(error, HTTPException), "registered for it"
    path = without_keys(request.url.path)[:80]
    headers = dict(error.headers or {})
    if error.status_code == 405:  # Starlette names the methods of the first route of this path alone
        headers["Allow"] = ", ".join(_methods(request))
    message = {
        404: f"there is nothing at {path!r}; {_ROUTE_HINT}",
        405: f"{path!r} does not take {request.method}, only {headers.get('Allow')}",
    }.get(error.status_code, error.detail)
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "no_route"}}
    content = error_body_for(ErrorReply(error.status_code, body, {}), request.scope["path"])
    return JSONResponse(content, status_code=error.status_code, headers=headers)


def _methods(request: Request) -> list[str]:
    """The methods that a request's path allows."""
    found = {
        method
        for route in flat_routes(request.app.routes)
        if route.path_regex.match(request.scope["path"])
        for method in route.methods or ()
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


class StripTrailingSlash:
    """Treats `/v1/models/` as `/v1/models`.

    A redirect would name this process's own idea of its address: http:// behind a proxy that terminates TLS.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/":
            scope["path"] = scope["path"].rstrip("/")
        await self._app(scope, receive, send)


class HeadAsGet:
    """Answers HEAD like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        scope.get("state", {}).pop(SEND_BODY, None)
        await self._app({**scope, "method": "GET"}, receive, without_body)


class TracingMiddleware:
    """Makes the spans of HTTP requests, around all other middleware but the log. Probes and the console's files have
    none."""

    def __init__(self, app: ASGIApp, tracer: RequestTracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES or is_console(scope["path"]):
            await self._app(scope, receive, send)
        else:
            await self._tracer.follow(self._app, scope, receive, send)
