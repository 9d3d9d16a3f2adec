"""Moves of contents between this machine's tiers, on their way to the journal.

In: events and digests, from any thread. Out: one write for all that moved within `MOVES_DELAY_S`. What happens before
there is an event loop waits for it. A move that the database does not take is lost, with a line in the log: the tiers
do not wait for their history.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Sequence

from app.deployments.registry.catalog import Move
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: Moves are written down together, this long after the first.
MOVES_DELAY_S = 0.2


class Moves:
    """`write` is called in threads."""

    def __init__(self, write: Callable[[Sequence[Move]], None]) -> None:
        self._write = write
        self._moves: list[Move] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Called once, on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._write_soon()

    def moved(self, event: str, digest: str) -> None:
        """Contents came to or left a tier of this process. Any thread."""
        move = Move(event, digest, time.time())
        if self._loop is None:
            self._moves.append(move)
        else:
            self._loop.call_soon_threadsafe(self._take, move)

    def _take(self, move: Move) -> None:
        self._moves.append(move)
        if len(self._moves) == 1:
            self._write_soon()

    def _write_soon(self) -> None:
        async def write() -> None:
            await asyncio.sleep(MOVES_DELAY_S)
            moves, self._moves = self._moves, []
            try:
                await asyncio.to_thread(self._write, moves)
            except NotReady as error:
                logger.warning("%d moves between tiers are not in the journal: %s", len(moves), error)

        task = asyncio.get_running_loop().create_task(write(), context=contextvars.Context())
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
