"""The request log: failures of the service always, every request if configured; and the header of ignored fields.

A line never contains a prompt, a key or a query.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.deployments.ingress.schemas.request_model import IGNORED_HEADER, ignored_header
from app.logging import LogEvent
from app.redaction import holds_key

logger = logging.getLogger(__name__)

#: Where a request's state has the server's `send`. Middleware changes only the start of a response, so a stream sends
#: its events there: each wrapper around `send` takes about half a microsecond per event.
SEND_BODY = "send_body"
#: Probes answer 503 while the service starts; that is not logged as a failure.
PROBES = frozenset({"/health", "/readyz", "/livez"})
#: Request ids of clients and proxies that are logged and returned unchanged.
_PLAIN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def request_id_of(connection: HTTPConnection) -> str | None:
    """The request's id: the client's `X-Request-ID`, or the one that Serve or HAProxy gave it."""
    given = connection.headers.get("x-request-id", "")
    return given if _PLAIN_ID.fullmatch(given) and not holds_key(given) else None


def note_failure(request: Request, message: str) -> None:
    """Record why a request failed, for its log line."""
    request.state.failure = message


class RequestLogMiddleware:
    """The outermost ASGI middleware. `every`: also log requests that succeed. `clock` returns seconds."""

    def __init__(self, app: ASGIApp, every: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._every = every
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = self._clock()
        state = scope.setdefault("state", {})
        state[SEND_BODY] = send
        status = 0  # until a response starts; stays 0 if the client disconnects first

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if names := ignored_header(state.get("ignored", ())):
                    message["headers"] = [*message["headers"], (IGNORED_HEADER.lower().encode(), names.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note_status)
        finally:
            failure = state.get("failure")
            is_failure = (status >= 500 or failure is not None) and scope["path"] not in PROBES
            if is_failure or self._every:
                client = scope.get("client")
                line = LogEvent(
                    "request failed" if is_failure else "request",
                    id=request_id_of(HTTPConnection(scope)),
                    method=scope["method"],
                    path=scope["path"][:200],
                    status=status or None,
                    client=client[0] if client else None,
                    model=state.get("model"),
                    seconds=self._clock() - began_s,
                    reason=failure,
                )
                logger.log(logging.WARNING if is_failure else logging.INFO, line)
