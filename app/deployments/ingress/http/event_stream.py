"""Server-sent events to one client; each stream is closed and counted once, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.deployments.ingress.error_responses import TABLE, ClientGone, ErrorReply, error_reply
from app.deployments.ingress.http.middleware.request_log import SEND_BODY
from app.deployments.ingress.serializers.completion_events import sse

T = TypeVar("T")

#: nginx passes a response with the second on at once, whatever its `proxy_buffering`.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
#: A comment, which clients skip, and the seconds between two of them: proxies close connections without bytes.
KEEP_ALIVE, KEEP_ALIVE_S = b": keep-alive\n\n", 10.0


class EventStream(StreamingResponse):
    """A stream of events whose last one is `done` or an error. Comments precede a first event that takes long.

    When the response is over, `on_end` has been called exactly once and the events are closed. Its status is 200, that
    of the error that ended the stream, or 499 if the client disconnected first.
    """

    def __init__(
        self,
        first: bytes | asyncio.Future[bytes],
        events: AsyncGenerator[bytes],
        on_end: Callable[[int], None],
        headers: Mapping[str, str],
        done: bytes = b"data: [DONE]\n\n",
        as_event: Callable[[ErrorReply], bytes] = lambda answer: sse(answer.body),
    ) -> None:
        """`first`: the first event, which may take long; `done` follows the last event; `as_event` formats an error."""
        super().__init__(events, media_type="text/event-stream", headers={**headers, **_HEADERS})
        self._first = first
        self._events = events
        self._on_end = on_end
        self._done, self._as_event = done, as_event
        self._status = TABLE[ClientGone].status
        self._failure: str | None = None
        self._send_body: Send | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_body = scope.get("state", {}).get(SEND_BODY)
        try:
            with suppress(ClientGone):
                await run_until_disconnect(receive, self.stream_response(send))
        finally:
            if self._failure is not None:
                scope.setdefault("state", {})["failure"] = self._failure
            self._on_end(self._status)
            if isinstance(self._first, asyncio.Future):
                self._first.cancel()
                await asyncio.gather(self._first, return_exceptions=True)
            await self._events.aclose()

    async def stream_response(self, send: Send) -> None:
        """Send the events in one loop: the base class's three nested loops are half the cost of an event."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send = self._send_body or send
        is_first = True
        while True:
            try:
                event = await self._awaited_first(send) if is_first else await anext(self._events)
                is_first = False
            except StopAsyncIteration:
                self._status, last = 200, self._done
                break
            except Exception as error:
                # The status line has been sent: OpenAI's clients look for an error object in the stream.
                answer = error_reply(error)
                self._status, last = answer.status, self._as_event(answer)
                self._failure = answer.body["error"]["message"]
                break
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _awaited_first(self, send: Send) -> bytes:
        """The first event; comments until then keep the connection open."""
        if isinstance(self._first, bytes):
            return self._first
        while not self._first.done():
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            await asyncio.wait((self._first,), timeout=KEEP_ALIVE_S)
        return self._first.result()


async def run_until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. If the client disconnects first, cancels it and raises ClientGone.

    Starlette's own task group (anyio) takes 100 us more.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client disconnected before the answer")
        return task.result()
    finally:
        for unfinished in (task, leaving):
            if not unfinished.done():
                unfinished.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
