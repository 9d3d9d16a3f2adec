"""Who works on batches: every ingress, each batch by one of them at a time.

In: batches that nobody works on, from the database that keeps them. Out: an answer per line, written down as they
come. A batch whose ingress dies is free again when its lease has run out; whoever takes it goes on with the lines that
have no answer. Rule: a line's request is let in, limited and counted as its tenant's own; what is refused for now is
tried again until the batch expires.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from app.config import AppConfig
from app.deployments.ingress.batches.lines import EXPIRED, FileError, Line, answered, failed, parsed, unanswered
from app.deployments.ingress.tenants import Caller
from app.deployments.kept.client import KeptClient
from app.deployments.kept.entries import Batch, BatchStatus, LeaseLost, LineAnswer
from app.deployments.links.tasks import Tasks
from app.deployments.tenants.limits import LimitReached
from app.engine.errors import (
    AdapterQuarantined,
    AdapterReadFailed,
    AdapterUnreadable,
    DeadlineExceeded,
    NotFound,
    NotReady,
    Overloaded,
)

logger = logging.getLogger(__name__)

#: Batches that one ingress works on at a time.
MAX_BATCHES = 8
#: How often it is asked whether there is work, and answers are written down.
POLL_S, WRITE_S = 3.0, 2.0
#: Pauses before a request that was refused for now is tried again.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
#: Tries of a request whose adapter cannot be read.
MAX_TRIES = 6
_LINES_AT_ONCE = 256

#: One request: the endpoint, its body, who asks, and its id. Raises what the endpoint answers with an error for.
AnswerLine = Callable[[str, Mapping[str, Any], Caller, str], Awaitable[Mapping[str, Any]]]


class BatchRunner:
    """One per ingress. `caller_of`: whose requests a batch's are, None if nobody's any more; `clock` is Unix time."""

    def __init__(
        self,
        kept: KeptClient,
        answer: AnswerLine,
        caller_of: Callable[[Batch], Caller | None],
        holder: str,
        config: AppConfig,
        clock: Callable[[], float],
        write_s: float = WRITE_S,
    ) -> None:
        self.kept, self.answer, self.holder, self.clock = kept, answer, holder, clock
        self.write_s = write_s
        self.places = asyncio.Semaphore(config.kept.batch_streams)
        self.num_streams = config.kept.batch_streams
        self._config = config
        self._caller_of = caller_of
        self._tasks = Tasks()
        self._wanted = asyncio.Event()

    def wake(self) -> None:
        """There is a new batch."""
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wanted.clear()
            while len(self._tasks) < MAX_BATCHES and (batch := await self.kept.claim(self.holder)) is not None:
                self._tasks.start(self._work(batch))
            try:
                await asyncio.wait_for(self._wanted.wait(), POLL_S)
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Leave what is not done to others."""
        await self._tasks.close()
        try:
            await self.kept.release(self.holder)
        except NotReady as error:
            logger.info("batches are left until their leases run out: %s", error)

    async def _work(self, batch: Batch) -> None:
        try:
            await self._run(batch)
        except LeaseLost as error:
            logger.info("%s", error)
        except NotReady as error:  # another takes it when the lease runs out
            logger.warning("batch %s is left for a while: %s", batch.id, error)

    async def _run(self, batch: Batch) -> None:
        caller = self._caller_of(batch)
        if caller is None:
            await self._refuse(batch, [FileError("project_archived", "the batch's project is archived")])
            return
        try:
            content = await self._content(batch)
        except NotFound:
            await self._refuse(batch, [FileError("input_file_gone", "the input file has expired or was deleted")])
            return
        limits = self._config.kept.max_batch_lines, self._config.limits.max_body_bytes
        lines, errors = await asyncio.to_thread(parsed, content, batch.endpoint, *limits)
        if errors:
            await self._refuse(batch, errors)
            return
        batch = await self.kept.begin_batch(batch.id, self.holder, len(lines))
        known = set(await self.kept.answered(batch.id))
        todo = [line for line in lines if line.number not in known]
        await _Work(self, batch, caller, todo).run()

    async def _content(self, batch: Batch) -> bytes:
        content, number = bytearray(), 0
        while (part := await self.kept.file_part(batch.input_file_id, number, tenant_id=batch.tenant_id)) is not None:
            content += part
            number += 1
        return bytes(content)

    async def _refuse(self, batch: Batch, errors: list[FileError]) -> None:
        await self.kept.finish(batch.id, self.holder, "failed", json.dumps([error._asdict() for error in errors]))


class _Work:
    """One batch, as long as this process works on it."""

    def __init__(self, runner: BatchRunner, batch: Batch, caller: Caller, lines: list[Line]) -> None:
        self._runner, self._batch, self._caller = runner, batch, caller
        self._lines = lines
        self._next: Iterator[Line] = iter(lines)
        self._written: set[int] = set()
        self._answers: list[LineAnswer] = []

    async def run(self) -> None:
        workers = [asyncio.create_task(self._worker()) for _ in range(min(self._runner.num_streams, len(self._lines)))]
        try:
            status = await self._until_ended(workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if status == "expired":
            done = self._written | {answer.number for answer in self._answers}
            self._answers += [unanswered(line, EXPIRED) for line in self._lines if line.number not in done]
        while self._answers:
            await self._write()
        await self._runner.kept.finish(self._batch.id, self._runner.holder, status)

    async def _until_ended(self, workers: list[asyncio.Task[None]]) -> BatchStatus:
        open_workers: set[asyncio.Task[None]] = set(workers)
        while True:
            await self._write()
            if self._batch.status == "cancelling":
                return "cancelled"
            if self._runner.clock() >= self._batch.expires_s:
                return "expired"
            if not open_workers:
                return "completed"
            _, open_workers = await asyncio.wait(open_workers, timeout=self._runner.write_s)

    async def _worker(self) -> None:
        for line in self._next:
            self._answers.append(await self._answer(line))

    async def _answer(self, line: Line) -> LineAnswer:
        request_id = f"{self._batch.id}-{line.number}"
        pause_s, num_tries = FIRST_PAUSE_S, 0
        while True:
            try:
                async with self._runner.places:
                    body = await self._runner.answer(self._batch.endpoint, line.body, self._caller, request_id)
                return answered(line, request_id, body)
            except Exception as error:  # whatever it is, it is this line's answer, or comes to nothing in a while
                num_tries += 1
                if not _is_passing(error, num_tries):
                    return failed(line, request_id, error)
                told_s = getattr(error, "retry_after_s", None) or 0.0
                await asyncio.sleep(min(max(pause_s, told_s), LONGEST_PAUSE_S))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _write(self) -> None:
        """Write down what there is, some of it, and renew the lease. While the database is away nothing is lost."""
        lines = self._answers[:_LINES_AT_ONCE]
        try:
            self._batch = await self._runner.kept.answer(self._batch.id, self._runner.holder, lines)
        except NotReady as error:
            logger.info("answers of batch %s are written down later: %s", self._batch.id, error)
            await asyncio.sleep(self._runner.write_s)
            return
        self._written.update(line.number for line in lines)
        del self._answers[: len(lines)]


def _is_passing(error: Exception, num_tries: int) -> bool:
    """Whether the same request may be answered later."""
    if isinstance(error, LimitReached):
        return error.retry_after_s is not None
    if isinstance(error, (AdapterQuarantined, AdapterUnreadable, AdapterReadFailed)):
        return num_tries < MAX_TRIES
    return isinstance(error, (Overloaded, DeadlineExceeded))
