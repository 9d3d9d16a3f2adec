"""What was used, on its way from the process that saw it to the ledger.

In: what every request has taken, as it ends. Out: numbered batches of sums per minute, project, key, model and
contents. Rule: a batch is sent until it is acknowledged, and always with the same number and the same rows, so that the
ledger takes it exactly once; what comes meanwhile is in the next one. With a journal, what a process that was killed
had counted is sent by another.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.engine.errors import InvalidRequest, NotReady
from app.engine.wire_format import message

logger = logging.getLogger(__name__)

#: How often what was used is written down.
FLUSH_INTERVAL_S = 1.0
#: After so many of them it is looked whether a process of this machine was killed.
ADOPT_EVERY = 5

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
class UsageRecord(NamedTuple):
    """What was used. Cached tokens are part of the prompt's. Loads are those of the adapter's rows to a device.

    `rank_row_ms`, `kv_block_ms`: rank rows and KV blocks that were held, times milliseconds.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    num_loads: int = 0
    load_bytes: int = 0
    cost_nanos: int = 0
    rank_row_ms: int = 0
    kv_block_ms: int = 0

    def plus(self, other: UsageRecord) -> UsageRecord:
        return UsageRecord(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


Row = tuple[LedgerKey, UsageRecord]
#: (who writes, number of the batch, rows). Raises NotReady while the ledger is away.
Write = Callable[[str, int, Sequence[Row]], Awaitable[None]]


class UsageLog(Protocol):
    """What of a journal is used here (`Journal`)."""

    def add(self, number: int, key: LedgerKey, charge: UsageRecord) -> None: ...

    def recorded(self, number: int) -> None: ...

    def abandoned(self) -> Iterator[tuple[str, int, Sequence[Row]]]: ...

    def close(self) -> None: ...


class UsageFlusher:
    """One per process, on its event loop. `writer_id` is of this process alone."""

    def __init__(self, write: Write, writer_id: str, journal: UsageLog | None = None) -> None:
        self._write = write
        self._writer_id = writer_id
        self._journal = journal
        self._open: dict[LedgerKey, UsageRecord] = {}
        self._sent: Sequence[Row] = ()
        self._number = 0
        self._writing = asyncio.Lock()

    def add(self, key: LedgerKey, charge: UsageRecord) -> None:
        """Something was used."""
        if self._journal is not None:
            try:
                self._journal.add(self._number + 1, key, charge)
            except OSError as error:  # a disk that is full must not refuse requests
                logger.error("usage is lost if this process is killed before it has told it: %s", error)
        held = self._open.get(key)
        self._open[key] = charge if held is None else held.plus(charge)

    async def keep_flushing(self) -> None:
        """`flush` every second, and now and then for processes that died, until cancelled."""
        for number in itertools.count():
            if number % ADOPT_EVERY == 0:
                await self.adopt()
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.flush()

    async def adopt(self) -> None:
        """Have written down what processes of this machine had counted when they were killed."""
        if self._journal is None:
            return
        try:
            for writer_id, number, rows in self._journal.abandoned():
                await self._written(writer_id, number, rows)
                logger.warning("wrote down usage of %d kinds for %s, which was killed", len(rows), writer_id)
        except NotReady as error:
            logger.warning("usage of processes that were killed waits to be written down: %s", error)
        except OSError as error:
            logger.error("usage of processes that were killed cannot be read: %s", error)

    async def flush(self) -> bool:
        """Have all that was used so far written down; False while the ledger is away."""
        async with self._writing:
            while self._sent or self._open:
                if not self._sent:
                    self._sent, self._open = tuple(self._open.items()), {}
                    self._number += 1
                try:
                    await self._written(self._writer_id, self._number, self._sent)
                except ActorUnavailable:  # it is told for all who call the ledger
                    return False
                except NotReady as error:
                    logger.warning("usage of %d kinds waits to be written down: %s", len(self._sent), error)
                    return False
                self._sent = ()
                if self._journal is not None:
                    self._journal.recorded(self._number)
            return True

    async def _written(self, writer_id: str, number: int, rows: Sequence[Row]) -> None:
        """What the ledger can never take is for the log: all that comes after it would wait for ever."""
        try:
            await self._write(writer_id, number, rows)
        except InvalidRequest as error:
            logger.error("usage is lost, for the ledger refuses it: %s; %s", error, rows)

    async def close(self) -> None:
        """Write down what was used, and leave the rest to others."""
        await self.flush()
        if self._journal is not None:
            self._journal.close()


def sum_usage(rows: Iterable[Row]) -> Sequence[Row]:
    """One row for each key, in the order in which keys came first."""
    sums: dict[LedgerKey, UsageRecord] = {}
    for key, charge in rows:
        sums[key] = charge if key not in sums else sums[key].plus(charge)
    return tuple(sums.items())
