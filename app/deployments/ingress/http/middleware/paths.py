"""Spellings of requests that mean the same: a slash at the end of a path, HEAD for GET."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class StripTrailingSlash:
    """`/v1/models/` is `/v1/models`. A redirect would send clients, with what they ask, to this process's own idea of
    its address: http:// behind a proxy that ends TLS.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/":
            scope["path"] = scope["path"].rstrip("/")
        await self._app(scope, receive, send)


class HeadAsGet:
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
