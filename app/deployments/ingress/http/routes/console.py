"""/console: the web console's files, as they are on disk; and /v1/session, which says who the caller is.

The console is static: it calls the documented routes with the caller's key, like any client. Its own links are
relative, so it works under any prefix.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.error_responses import WrongKeyKind
from app.deployments.ingress.http.middleware.auth import request_key
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.middleware.sessions import COOKIE, ConsoleSessions, Session
from app.deployments.ingress.http.request_parsing import JsonBody
from app.deployments.ingress.principal import Principal, http_principal
from app.deployments.ingress.schemas.health import SessionResponse
from app.deployments.ingress.schemas.request_model import Body
from app.deployments.ingress.service import IngressService
from app.engine.errors import NotFound

FOLDER = Path(__file__).parents[2] / "console"
#: How long a session lasts unless the sign-in says otherwise, and at most.
SESSION_S, MAX_SESSION_S = 8 * 3600, 7 * 86_400
#: Scripts, styles and calls of this origin only, no frames, and nothing inline.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


class SessionBody(Body):
    """How long the session lasts."""

    may_be_empty = True

    expires_in_seconds: int = Field(default=SESSION_S, ge=60, le=MAX_SESSION_S)


class _Asset(NamedTuple):
    content: bytes
    compressed: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, _Asset]:
    """The console's files by their path in its folder."""
    return {
        path.relative_to(FOLDER).as_posix(): _asset(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in (".html", ".js", ".css", ".svg", ".txt", ".json")
    }


def _asset(path: Path) -> _Asset:
    content = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "text/plain"
    if path.suffix == ".js":
        kind = "text/javascript"
    return _Asset(
        content,
        gzip.compress(content, 9, mtime=0),
        f"{kind}; charset=utf-8",
        f'"{hashlib.sha256(content).hexdigest()[:20]}"',
    )


def add_console_routes(app: FastAPI, service: IngressService, policy: HttpPolicy, sessions: ConsoleSessions) -> None:
    async def index(request: Request) -> Response:
        """The console's page. Its links are relative to `/console/`, so it is only there."""
        raw_path: bytes = request.scope.get("raw_path") or b"/console/"
        if not raw_path.partition(b"?")[0].endswith(b"/"):
            return Response(status_code=307, headers={"Location": "console/"} | _HEADERS)
        return _answer(request, "index.html")

    async def file(request: Request) -> Response:
        """One of the console's files."""
        return _answer(request, request.path_params["path"])

    app.add_route("/console", index)
    app.add_route("/console/{path:path}", file)

    @app.get("/v1/session", response_model=SessionResponse)
    async def who(request: Request) -> Response:
        """The caller of this request, and what it may do."""
        return JSONResponse(_session_body(http_principal(request), service))

    @app.post("/v1/session", response_model=SessionResponse)
    async def sign_in(request: Request, body: JsonBody[SessionBody]) -> Response:
        """Start a session of the web console for the API key of this request: a cookie of limited life."""
        caller = http_principal(request)
        if not caller.key_id or not request_key(request):  # a session does not renew itself
            raise WrongKeyKind("only an API key can start a session; the management token is sent with each request")
        expires_s = int(service.accounting.clock()) + body.expires_in_seconds
        response = JSONResponse(_session_body(caller, service) | {"expires": expires_s})
        response.set_cookie(
            COOKIE,
            await sessions.cookie(Session(caller.key_id, expires_s)),
            max_age=body.expires_in_seconds,
            path="/",
            secure="https" in (request.url.scheme, request.headers.get("x-forwarded-proto")),
            httponly=True,
            samesite="strict",
        )
        return response

    @app.delete("/v1/session", status_code=204)
    async def sign_out() -> Response:
        """End the session of this browser, if it has one. Needs no key."""
        response = Response(status_code=204)
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return response

    def _session_body(caller: Principal, service: IngressService) -> dict[str, object]:
        return {
            "object": "session",
            "kind": caller.kind,
            "key_id": caller.key_id or None,
            "role": caller.role if caller.kind == "project" else None,
            "project_id": caller.tenant_id if caller.kind == "project" else None,
            "project_name": caller.tenant.name if caller.kind == "project" else None,
            "model": service.base_name,
            "has_projects": service.accounting.view.num_tenants > 0 or policy.auth != "open",
            "expires": None,
        }


def _answer(request: Request, path: str) -> Response:
    asset = assets().get(path)
    if asset is None:
        raise NotFound(f"the console has no file {path[:80]!r}")
    headers = _HEADERS | {"ETag": asset.etag}
    if request.headers.get("if-none-match", "").removeprefix("W/") == asset.etag:
        return Response(status_code=304, headers=headers)
    content = asset.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content = asset.compressed
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type=asset.media_type, headers=headers)
