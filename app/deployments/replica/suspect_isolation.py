"""Requests that were being computed when an engine failed, tried again one at a time.

In: such requests, in the order in which they come to an engine, and the chunks that it makes. Out: one of them at a
time enters the engine, among requests that nobody suspects. So a step that fails again has one suspect, whose fault it
is, and the others go on. A trial ends with the first new token, because the request got past the step that failed. The
trial of a request that was in two failed steps lasts until the request ends. The dispatcher knows who is suspected.
"""

from __future__ import annotations

from collections.abc import Callable

from app.engine.request import GenerateRequest, TokenChunk


class SuspectQueue:
    """The suspects of one engine, on its service's event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[GenerateRequest, Callable[[], bool]]] = {}
        self._current: GenerateRequest | None = None

    @property
    def current(self) -> str | None:
        """The id of the request that is on trial in the engine."""
        return None if self._current is None else self._current.request_id

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, request: GenerateRequest, enter: Callable[[], bool]) -> None:
        """Call `enter` when it is this request's turn; it says whether the engine has taken it."""
        self._waiting[request.request_id] = request, enter
        self._next()

    def heard(self, chunk: TokenChunk) -> None:
        """Take note of a chunk that the engine has computed; it must be given every chunk, in order."""
        request = self._current
        if request is None or chunk.request_id != request.request_id:
            return
        if chunk.finish_reason is not None or (chunk.token_ids and request.num_failures == 1):
            self._current = None
            self._next()

    def forget(self, request_id: str) -> None:
        """The request was aborted."""
        self._waiting.pop(request_id, None)
        if self.current == request_id:
            self._current = None
            self._next()

    def _next(self) -> None:
        while self._current is None and self._waiting:
            request_id = next(iter(self._waiting))
            request, enter = self._waiting.pop(request_id)
            self._current = request
            if not enter():
                self._current = None
