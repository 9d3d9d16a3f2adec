"""What was used, on its way from an ingress to the ledger.

In: the cost of every request that has ended, however it ended. Out: numbered batches of sums per minute, project, key,
model and contents. Rule: a batch is sent until it is acknowledged, and always with the same number and the same rows,
so that the ledger takes it exactly once; what comes meanwhile is in the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple

from app.engine.errors import NotReady
from app.engine.message import message

logger = logging.getLogger(__name__)

#: How often what was used is written down.
FLUSH_INTERVAL_S = 1.0

RouteKind = Literal["completions", "embeddings"]


@message
class LedgerKey(NamedTuple):
    """What a row of the ledger is about. `digest` is empty for the base model."""

    minute: int  # Unix time in minutes
    project_id: str
    key_id: str
    model: str
    digest: str
    route_kind: RouteKind


@message
class Charge(NamedTuple):
    """What was used. Cached tokens are part of the prompt's. Loads are those of the adapter's rows to a device."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_loads: int = 0
    load_bytes: int = 0
    cost_nanos: int = 0

    def plus(self, other: Charge) -> Charge:
        return Charge(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


Row = tuple[LedgerKey, Charge]
#: (who writes, number of the batch, rows). Raises NotReady while the ledger is away.
Write = Callable[[str, int, Sequence[Row]], Awaitable[None]]


class Metering:
    """One per ingress, on its event loop. `writer_id` is of this process alone."""

    def __init__(self, write: Write, writer_id: str) -> None:
        self._write = write
        self._writer_id = writer_id
        self._open: dict[LedgerKey, Charge] = {}
        self._sent: Sequence[Row] = ()
        self._number = 0
        self._writing = asyncio.Lock()

    def add(self, key: LedgerKey, charge: Charge) -> None:
        """Something was used."""
        held = self._open.get(key)
        self._open[key] = charge if held is None else held.plus(charge)

    async def keep_flushing(self) -> None:
        """`flush` every second, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.flush()

    async def flush(self) -> bool:
        """Have all that was used so far written down; False while the ledger is away."""
        async with self._writing:
            while self._sent or self._open:
                if not self._sent:
                    self._sent, self._open = tuple(self._open.items()), {}
                    self._number += 1
                try:
                    await self._write(self._writer_id, self._number, self._sent)
                except NotReady as error:
                    logger.warning("usage of %d kinds waits to be written down: %s", len(self._sent), error)
                    return False
                self._sent = ()
            return True
