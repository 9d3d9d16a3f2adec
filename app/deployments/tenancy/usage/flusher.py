"""Batches of usage on their way from the process that records it to the ledger.

Rows are summed per minute, project, key, model and contents. A batch is sent until it is acknowledged, always with the
same number and rows, so the ledger takes it exactly once; later usage goes into the next batch. With a WAL, another
process sends what a killed one had recorded.
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

#: How often usage is flushed.
FLUSH_INTERVAL_S = 1.0
#: Flushes between two looks for orphaned batches of killed processes on this machine.
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
    """Used amounts. Cached tokens are part of the prompt's. Loads are of the adapter's rows to a device.

    `rank_row_ms`, `kv_block_ms`: rank rows and KV blocks held, times milliseconds.
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
        return UsageRecord(*(first + second for first, second in zip(self, other, strict=True)))


Row = tuple[LedgerKey, UsageRecord]
#: (writer id, batch number, rows). Raises NotReady while the ledger is unavailable.
Write = Callable[[str, int, Sequence[Row]], Awaitable[None]]


class UsageLog(Protocol):
    """`UsageWal`, which imports this module."""

    def add(self, number: int, key: LedgerKey, usage: UsageRecord) -> None: ...

    def acknowledge(self, number: int) -> None: ...

    def orphans(self) -> Iterator[tuple[str, int, Sequence[Row]]]: ...

    def close(self) -> None: ...


class UsageFlusher:
    """One per process, on its event loop. `writer_id` must be unique to this process."""

    def __init__(self, write: Write, writer_id: str, wal: UsageLog | None = None) -> None:
        self._write = write
        self._writer_id = writer_id
        self._wal = wal
        self._open: dict[LedgerKey, UsageRecord] = {}
        self._sent: Sequence[Row] = ()
        self._number = 0
        self._writing = asyncio.Lock()

    def add(self, key: LedgerKey, usage: UsageRecord) -> None:
        """Add usage to the open batch."""
        if self._wal is not None:
            try:
                self._wal.add(self._number + 1, key, usage)
            except OSError as error:  # a full disk must not fail requests
                logger.error(
                    "cannot write the usage log; usage not yet flushed is lost if this process is killed: %s", error
                )
        earlier = self._open.get(key)
        self._open[key] = usage if earlier is None else earlier.plus(usage)

    async def flush_loop(self) -> None:
        """Flush every second, and adopt orphaned batches now and then, until cancelled."""
        for number in itertools.count():
            if number % ADOPT_EVERY == 0:
                await self.adopt()
            await asyncio.sleep(FLUSH_INTERVAL_S)
            await self.flush()

    async def adopt(self) -> None:
        """Send the batches of killed processes on this machine."""
        if self._wal is None:
            return
        try:
            for writer_id, number, rows in self._wal.orphans():
                await self._send(writer_id, number, rows)
                logger.warning("recorded %d rows of usage for the killed process %s", len(rows), writer_id)
        except NotReady as error:
            logger.warning("usage of killed processes is still to be recorded: %s", error)
        except OSError as error:
            logger.error("cannot read the usage of killed processes: %s", error)

    async def flush(self) -> bool:
        """Send all usage so far; returns False while the ledger is unavailable."""
        async with self._writing:
            while self._sent or self._open:
                if not self._sent:
                    self._sent, self._open = tuple(self._open.items()), {}
                    self._number += 1
                try:
                    await self._send(self._writer_id, self._number, self._sent)
                except ActorUnavailable:  # logged once for all callers of the ledger
                    return False
                except NotReady as error:
                    logger.warning("%d rows of usage are still to be recorded: %s", len(self._sent), error)
                    return False
                self._sent = ()
                if self._wal is not None:
                    self._wal.acknowledge(self._number)
            return True

    async def _send(self, writer_id: str, number: int, rows: Sequence[Row]) -> None:
        """Send a batch. One that the ledger refuses is logged and dropped: all later ones would wait for ever."""
        try:
            await self._write(writer_id, number, rows)
        except InvalidRequest as error:
            logger.error("dropping usage that the ledger refuses: %s; %s", error, rows)

    async def close(self) -> None:
        """Flush, and leave the rest to other processes."""
        await self.flush()
        if self._wal is not None:
            self._wal.close()


def sum_usage(rows: Iterable[Row]) -> Sequence[Row]:
    """One row for each key, in order of first occurrence."""
    sums: dict[LedgerKey, UsageRecord] = {}
    for key, usage in rows:
        sums[key] = usage if key not in sums else sums[key].plus(usage)
    return tuple(sums.items())
