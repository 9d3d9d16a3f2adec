"""Requests suspected of crashing an engine, retried one at a time.

A suspect was being computed when an engine failed. Only one at a time enters the engine, among requests without
suspicion, so a step that fails again has one suspect: it is the cause, and the others continue. A trial ends with the
first new token, because the request got past the step that failed; the trial of a request that was in two failed steps
lasts until the request ends.
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
        """The id of the request on trial."""
        return None if self._current is None else self._current.request_id

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: GenerateRequest, enter: Callable[[], bool]) -> None:
        """Queue a suspect; `enter` is called when it is its turn and returns whether the engine accepted it."""
        self._waiting[request.request_id] = request, enter
        self._admit_next()

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Process a chunk of the engine; must get every chunk, in order."""
        request = self._current
        if request is None or chunk.request_id != request.request_id:
            return
        if chunk.finish_reason is not None or (chunk.token_ids and request.num_failures == 1):
            self._current = None
            self._admit_next()

    def remove(self, request_id: str) -> None:
        """Remove an aborted request."""
        self._waiting.pop(request_id, None)
        if self.current == request_id:
            self._current = None
            self._admit_next()

    def _admit_next(self) -> None:
        while self._current is None and self._waiting:
            request_id = next(iter(self._waiting))
            request, enter = self._waiting.pop(request_id)
            self._current = request
            if not enter():
                self._current = None
