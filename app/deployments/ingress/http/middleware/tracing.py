"""Spans of HTTP requests; `app.deployments.ingress.tracing` makes them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from app.deployments.ingress.http.middleware.origin_check import is_console
from app.deployments.ingress.http.middleware.request_log import PROBES
from app.deployments.ingress.tracing import RequestTracer


class TracingMiddleware:
    """ASGI middleware around all others but the log. Probes and the console's files have no spans."""

    def __init__(self, app: ASGIApp, tracer: RequestTracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES or is_console(scope["path"]):
            await self._app(scope, receive, send)
        else:
            await self._tracer.follow(self._app, scope, receive, send)
