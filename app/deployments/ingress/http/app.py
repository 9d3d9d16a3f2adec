"""The HTTP application: middleware, routes, and one handler for each family of errors.

In: an `IngressService` (the ingress). Out: a FastAPI application. Bodies are read with a limit and parsed
strictly; every error leaves through `status`. The first event of a stream is waited for before
the status line is sent, so that a refused request has its proper code. A client that goes away cancels
its work, streaming or not.
"""

from __future__ import annotations

from functools import cache, partial

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.error_responses import ErrorReply, error_reply
from app.deployments.ingress.http.middleware.auth import Authenticator, AuthMiddleware
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy, OriginCheckMiddleware
from app.deployments.ingress.http.middleware.paths import HeadAsGet, StripTrailingSlash
from app.deployments.ingress.http.middleware.request_log import RequestLogMiddleware, note_failure
from app.deployments.ingress.http.openapi import flat_routes, openapi, operation_id
from app.deployments.ingress.http.request_parsing import check_query, invalid_query
from app.deployments.ingress.http.routes.admin import admin_router
from app.deployments.ingress.http.routes.aliases import add_alias_routes
from app.deployments.ingress.http.routes.audit import add_journal_routes
from app.deployments.ingress.http.routes.batches import add_batch_routes
from app.deployments.ingress.http.routes.compat import add_load_routes
from app.deployments.ingress.http.routes.files import add_file_routes
from app.deployments.ingress.http.routes.health import add_about_routes
from app.deployments.ingress.http.routes.loras import add_adapter_routes
from app.deployments.ingress.http.routes.messages import add_agent_routes
from app.deployments.ingress.http.routes.models import add_model_routes
from app.deployments.ingress.http.routes.openai import add_openai_routes
from app.deployments.ingress.http.routes.uploads import add_upload_route
from app.deployments.ingress.principal import http_principal
from app.deployments.ingress.schemas.response_model import ErrorResponse
from app.deployments.ingress.serializers.messages import body_told
from app.deployments.ingress.service import IngressService
from app.deployments.tenancy.quota.limits import LimitError
from app.engine.errors import PolyloraError
from app.redaction import without_keys


def make_app(service: IngressService, rules: HttpPolicy, *, log_requests: bool = False) -> FastAPI:
    """All routes over one service, for those whom the rules let in. log_requests: write each request down."""
    app = FastAPI(
        title="polylora",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        dependencies=[Depends(check_query)],
        responses={"default": {"model": ErrorResponse}},
        generate_unique_id_function=operation_id,
    )
    # The last one added is the first that sees a request.
    app.add_middleware(AuthMiddleware, gate=Authenticator(service.tenancy, rules))
    app.add_middleware(StripTrailingSlash)
    app.add_middleware(HeadAsGet)
    if rules.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=rules.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(OriginCheckMiddleware, rules=rules)
    app.add_middleware(RequestLogMiddleware, every=log_requests)

    app.state.service = service  # for `JsonBody`
    app.openapi = cache(partial(openapi, app))  # type: ignore[method-assign]

    async def refuse(request: Request, error: Exception) -> Response:
        answer = error_reply(error)
        if answer.status >= 500:
            note_failure(request, answer.body["error"]["message"])
        path: str = getattr(request.scope.get("route"), "path", "/none")  # as declared: names are not filled in
        route = path.removeprefix("/v1").split("/")[1]
        service.observe(route, answer.status, getattr(request.state, "job", None))
        headers = service.tenancy.headers(http_principal(request)) if isinstance(error, LimitError) else {}
        body = body_told(answer, request.scope["path"])
        return JSONResponse(body, status_code=answer.status, headers=headers | answer.headers)

    async def refuse_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for it"
        return await refuse(request, invalid_query(error))

    app.add_exception_handler(RequestValidationError, refuse_query)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, refuse)
    app.add_exception_handler(PolyloraError, refuse)
    add_model_routes(app, service)
    add_openai_routes(app, service)
    add_agent_routes(app, service)
    add_file_routes(app, service)
    add_batch_routes(app, service)
    management = APIRouter(dependencies=[Depends(rules.check_management)])
    add_load_routes(management, service)
    add_adapter_routes(management, service)
    add_journal_routes(management, service)
    add_alias_routes(management, service)
    add_upload_route(management, service)
    app.include_router(management)
    app.include_router(admin_router(service))
    add_about_routes(app, service)
    return app


_WHAT_THERE_IS = (
    "requests go to POST /v1/chat/completions, /v1/completions, /v1/embeddings or /generate, GET /v1/models lists "
    "models and adapters, GET /openapi.json has every route"
)
#: What other servers have here.
_ELSEWHERE = {
    "/metrics": "Prometheus finds metrics on the port of Ray's agent, on every node: docs/architecture.md says which; "
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
    told = body_told(ErrorReply(error.status_code, body, {}), request.scope["path"])
    return JSONResponse(told, status_code=error.status_code, headers=headers)


def _methods(request: Request) -> list[str]:
    """What the path of a request takes."""
    found = {
        method
        for route in flat_routes(request.app.routes)
        if route.path_regex.match(request.scope["path"])
        for method in route.methods or ()
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))
