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
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from app.config import AppConfig
from app.deployments.ingress.batches.batch_file import (
    ARCHIVED,
    EXPIRED,
    BatchLine,
    FileCheck,
    FileError,
    NumberedBatchLine,
    Splitter,
    error_line,
    parse_line,
    result_line,
    unfinished_line,
)
from app.deployments.ingress.principal import Principal
from app.deployments.object_storage.models import Batch, BatchStatus, LeaseLost, LineResult
from app.deployments.object_storage.service import StorageService
from app.deployments.rpc.background_tasks import Tasks, backoff_s
from app.deployments.rpc.wait_for_event import wait_for_event
from app.deployments.tenancy.quota.limits import LimitError
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
ADAPTER_ERRORS = (AdapterQuarantined, AdapterUnreadable, AdapterReadFailed)
_LINES_AT_ONCE = 256
#: A longer line is decoded in a thread: it would hold up every stream of this process.
MAX_INLINE_BYTES = 20_000

#: One request: the endpoint, its body, who asks, and its id. Raises what the endpoint answers with an error for.
AnswerLine = Callable[[str, Mapping[str, Any], Principal, str], Awaitable[Mapping[str, Any]]]


class BatchRunner:
    """One per ingress. `caller_of`: whose requests a batch's are, None if nobody's any more; `clock` is Unix time."""

    def __init__(
        self,
        storage: StorageService,
        answer: AnswerLine,
        caller_of: Callable[[Batch], Principal | None],
        holder: str,
        config: AppConfig,
        clock: Callable[[], float],
        write_s: float = WRITE_S,
    ) -> None:
        self.storage, self.answer, self.holder, self.clock = storage, answer, holder, clock
        self.write_s = write_s
        self.places = asyncio.Semaphore(config.storage.batch_concurrency)
        self.num_streams = config.storage.batch_concurrency
        self.max_line_bytes = config.limits.max_body_bytes
        self._config = config
        self.caller_of = caller_of
        self._tasks = Tasks()
        self._wanted = asyncio.Event()

    def wake(self) -> None:
        """There is a new batch."""
        self._wanted.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._wanted.clear()
            while len(self._tasks) < MAX_BATCHES and (batch := await self.storage.claim(self.holder)) is not None:
                self._tasks.start(self._work(batch))
            await wait_for_event(self._wanted, POLL_S)

    async def close(self) -> None:
        """Leave what is not done to others."""
        await self._tasks.close()
        try:
            await self.storage.release(self.holder)
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
        if self.caller_of(batch) is None:
            await self._refuse(batch, [FileError(*ARCHIVED)])
            return
        try:
            check = FileCheck(batch.endpoint, self._config.storage.max_batch_lines, self.max_line_bytes)
            async for lines in self.file_lines(batch):
                await asyncio.to_thread(check.add, lines)
            if errors := check.errors():
                await self._refuse(batch, errors)
                return
            batch = await self.storage.begin_batch(batch.id, self.holder, check.num_lines)
            known = set(await self.storage.answered(batch.id))
            await _Work(self, batch, known, min(self.num_streams, check.num_lines)).run()
        except NotFound:
            await self._refuse(batch, [FileError("input_file_gone", "the input file has expired or was deleted")])

    async def file_lines(self, batch: Batch) -> AsyncGenerator[list[NumberedBatchLine]]:
        """The lines of a batch's file as its parts come. Raises NotFound."""
        splitter, number = Splitter(self.max_line_bytes), 0
        while (part := await self._part(batch, number)) is not None:
            yield splitter.push(part)
            number += 1
        yield splitter.end()

    async def _part(self, batch: Batch, number: int) -> bytes | None:
        while True:
            try:
                return await self.storage.file_part(batch.input_file_id, number, tenant_id=batch.tenant_id)
            except NotReady as error:
                logger.info("the file of batch %s is read on later: %s", batch.id, error)
                await asyncio.sleep(self.write_s)

    async def _refuse(self, batch: Batch, errors: list[FileError]) -> None:
        await self.storage.finish(batch.id, self.holder, "failed", json.dumps([error._asdict() for error in errors]))


class _Work:
    """One batch, as long as this process works on it."""

    def __init__(self, runner: BatchRunner, batch: Batch, written: set[int], num_workers: int) -> None:
        """`written`: numbers of the lines that have an answer; they become more."""
        self._runner, self._batch = runner, batch
        self._written, self._num_workers = written, num_workers
        self._lines = self._unwritten()
        self._turn = asyncio.Lock()  # of whoever takes the next line
        self._answers: list[LineResult] = []

    async def run(self) -> None:
        """Raises NotFound if the file goes away meanwhile, LeaseLost, NotReady."""
        workers = [asyncio.create_task(self._worker()) for _ in range(self._num_workers)]
        try:
            status = await self._until_ended(workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self._lines.aclose()
        if status == "expired":
            while self._answers:
                await self._write()
            async for line in self._unwritten():
                self._answers.append(unfinished_line(line, EXPIRED))
        while self._answers:
            await self._write()
        await self._runner.storage.finish(self._batch.id, self._runner.holder, status)

    async def _unwritten(self) -> AsyncGenerator[BatchLine]:
        """The lines that had no answer when the part that they are in was read."""
        batch, max_bytes = self._batch, self._runner.max_line_bytes
        async for lines in self._runner.file_lines(batch):
            for number, text in [line for line in lines if line.text.strip() and line.number not in self._written]:
                if len(text) > MAX_INLINE_BYTES:
                    found = await asyncio.to_thread(parse_line, number, text, batch.endpoint, max_bytes)
                else:
                    found = parse_line(number, text, batch.endpoint, max_bytes)
                assert isinstance(found, BatchLine), "the file was checked, and files do not change"
                yield found

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
            ended, open_workers = await asyncio.wait(open_workers, timeout=self._runner.write_s)
            for worker in ended:
                worker.result()

    async def _worker(self) -> None:
        while True:
            async with self._turn:
                line = await anext(self._lines, None)
            if line is None:
                return
            self._answers.append(await self._answer(line))

    async def _answer(self, line: BatchLine) -> LineResult:
        request_id = f"{self._batch.id}-{line.number}"
        pauses_s, num_tries = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0
        while True:
            try:
                async with self._runner.places:
                    caller = self._runner.caller_of(self._batch)  # limits and rights as they are now, not as they were
                    if caller is None:
                        return unfinished_line(line, ARCHIVED)
                    body = await self._runner.answer(self._batch.endpoint, line.body, caller, request_id)
                return result_line(line, request_id, body)
            except Exception as error:  # whatever it is, it is this line's answer, or comes to nothing in a while
                num_tries += 1
                if not is_passing(error) or (isinstance(error, ADAPTER_ERRORS) and num_tries >= MAX_TRIES):
                    return error_line(line, request_id, error)
                told_s = getattr(error, "retry_after_s", None) or 0.0
                await asyncio.sleep(min(max(next(pauses_s), told_s), LONGEST_PAUSE_S))

    async def _write(self) -> None:
        """Write down what there is, some of it, and renew the lease. While the database is away nothing is lost."""
        lines = self._answers[:_LINES_AT_ONCE]
        try:
            self._batch = await self._runner.storage.answer(self._batch.id, self._runner.holder, lines)
        except NotReady as error:
            logger.info("answers of batch %s are written down later: %s", self._batch.id, error)
            await asyncio.sleep(self._runner.write_s)
            return
        self._written.update(line.number for line in lines)
        del self._answers[: len(lines)]


def is_passing(error: Exception) -> bool:
    """Whether the same request may be answered later."""
    if isinstance(error, LimitError):
        return error.retry_after_s is not None
    return isinstance(error, (Overloaded, DeadlineExceeded, *ADAPTER_ERRORS))
