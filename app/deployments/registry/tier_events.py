"""Events of the store's tiers, carried from their threads to one follower's event loop.

It exists before the tiers and before its follower; earlier events wait for the follower.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from app.deployments.registry.models import State


class Move(NamedTuple):
    """A change of contents on a tier, such as "deleted from host"."""

    event: str
    digest: str
    time_s: float

    @property
    def leaves(self) -> bool:
        """Whether the contents are gone from there."""
        return self.event.startswith(("deleted from ", "unloaded from "))


class TierEvents:
    """`clock` gives Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._follow: tuple[Callable[[str, State], None], Callable[[Move], None]] | None = None
        self._waiting: list[Move | tuple[str, State]] = []

    def follow(self, on_progress: Callable[[str, State], None], on_move: Callable[[Move], None]) -> None:
        """Call these on the running event loop with waiting and future events. There is one follower: later calls
        change nothing.
        """
        with self._lock:
            if self._loop is not None:
                return
            self._loop, self._follow = asyncio.get_running_loop(), (on_progress, on_move)
            for item in self._waiting:
                self._loop.call_soon_threadsafe(self._call_follower, item)
            self._waiting.clear()

    def on_progress(self, source: str, state: State) -> None:
        """Reading a source has reached this state. Called from any thread."""
        self._deliver((source, state))

    def on_move(self, event: str, digest: str) -> None:
        """Contents came to or left a tier. Called from any thread."""
        self._deliver(Move(event, digest, self._clock()))

    def _deliver(self, item: Move | tuple[str, State]) -> None:
        with self._lock:
            if self._loop is None:
                self._waiting.append(item)
            else:
                self._loop.call_soon_threadsafe(self._call_follower, item)

    def _call_follower(self, item: Move | tuple[str, State]) -> None:
        assert self._follow is not None, "it is set with the loop"
        on_progress, on_move = self._follow
        if isinstance(item, Move):
            on_move(item)
        else:
            on_progress(*item)
