"""The batch worker of an ingress: claims batches from the database and answers their lines.

A lease makes sure that one ingress at a time works on a batch. When an ingress dies its leases expire, and another one
continues with the lines that have no answer. A line's request counts against its tenant's limits; transient errors are
retried until the batch expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from app.config import AppConfig
from app.deployments.ingress.batches.batch_file import (
    EXPIRED,
    BatchLine,
    FileCheck,
    FileError,
    LineSplitter,
    NumberedBatchLine,
    TooManyLines,
    error_line,
    parse_line,
    result_line,
    unfinished_line,
)
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.principal import Principal
from app.deployments.object_storage.models import Batch, BatchStatus, LeaseLost, LineResult, StorageQuotaExceeded
from app.deployments.object_storage.service import StorageService
from app.deployments.rpc.background_tasks import Tasks, backoff_s, wait_for_event
from app.deployments.tenancy.quota.limits import LimitError
from app.engine.errors import (
    AdapterQuarantined,
    AdapterReadFailed,
    AdapterUnreadable,
    DeadlineExceeded,
    NotFound,
    NotReady,
    ServerOverloaded,
)

logger = logging.getLogger(__name__)

#: Concurrent batches per ingress.
MAX_BATCHES = 8
#: Intervals of polling for batches of other ingresses, which may have ended or be busy, and of writing answers.
POLL_S, WRITE_S = 10.0, 2.0
#: Backoff after a transient error.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
#: Attempts for a request whose adapter cannot be read, and for one that generates tokens until its time is over.
MAX_TRIES, MAX_TIMEOUTS = 6, 2
ADAPTER_ERRORS = (AdapterQuarantined, AdapterUnreadable, AdapterReadFailed)
#: Answers per call to the database, and their bytes unless one alone has more.
_LINES_AT_ONCE, _BYTES_AT_ONCE = 256, 8 << 20

#: Executes one request: endpoint, body, caller and request id. Returns the response's JSON. Raises the endpoint's
#: errors.
AnswerLine = Callable[[str, Mapping[str, Any], Principal, str], Awaitable[bytes]]


class BatchRunner:
    """One per ingress. `caller_of`: a batch's principal now, or the error code and message of all its open lines;
    `clock`: Unix time.
    """

    def __init__(
        self,
        storage: StorageService,
        answer: AnswerLine,
        caller_of: Callable[[Batch], Principal | tuple[str, str]],
        holder: str,
        config: AppConfig,
        clock: Callable[[], float],
        write_s: float = WRITE_S,
    ) -> None:
        self.storage, self.answer, self.holder, self.clock = storage, answer, holder, clock
        self.write_s = write_s
        self.slots = asyncio.Semaphore(config.storage.batch_concurrency)
        self.num_streams = config.storage.batch_concurrency
        self.max_line_bytes = config.limits.max_body_bytes
        self.max_tenant_bytes = config.storage.max_tenant_bytes
        self._config = config
        self.caller_of = caller_of
        self._tasks = Tasks()
        self._in_work = set[str]()
        self._wake_event = asyncio.Event()

    def wake(self) -> None:
        """Look for new batches now instead of at the next poll."""
        self._wake_event.set()

    async def run(self) -> None:
        """Claim and run batches until cancelled."""
        while True:
            self._wake_event.clear()
            while len(self._tasks) < MAX_BATCHES and (batch := await self.storage.claim(self.holder)) is not None:
                if batch.id not in self._in_work:  # it is, if it could not renew its lease in time
                    self._tasks.start(self._work(batch)).add_done_callback(lambda _: self.wake())  # there is room again
            await wait_for_event(self._wake_event, POLL_S)

    async def close(self) -> None:
        """Stop, and release the leases for other ingresses."""
        await self._tasks.close()
        try:
            await self.storage.release(self.holder)
        except NotReady as error:
            logger.info("batches stay leased until their leases expire: %s", error)

    async def _work(self, batch: Batch) -> None:
        self._in_work.add(batch.id)
        try:
            await self._run(batch)
        except LeaseLost as error:
            logger.info("%s", error)
        except NotReady as error:  # another ingress claims it when the lease expires
            logger.warning("batch %s is suspended until its lease expires: %s", batch.id, error)
        finally:
            self._in_work.discard(batch.id)

    async def _run(self, batch: Batch) -> None:
        caller = self.caller_of(batch)
        if batch.status == "validating" and not isinstance(caller, Principal):
            await self._refuse(batch, [FileError(*caller)])
            return
        try:
            check = await self._check(batch)
            if errors := check.errors():
                await self._refuse(batch, errors)
                return
            batch = await self.storage.begin_batch(batch.id, self.holder, check.num_lines)
            known = set(await self.storage.answered_lines(batch.id))
            await _BatchRun(self, batch, known, min(self.num_streams, check.num_lines)).run()
        except TooManyLines as error:
            await self._refuse(batch, [FileError("too_many_tasks", str(error))])
        except NotFound:
            await self._refuse(batch, [FileError("input_file_gone", "the input file has expired or was deleted")])
        except StorageQuotaExceeded as error:  # what was written before stays, as the batch's output
            await self._refuse(batch, [FileError("storage_quota_reached", str(error))])

    async def _check(self, batch: Batch) -> FileCheck:
        """Validate the batch's file, which may take longer than a lease. Raises LeaseLost, NotFound, TooManyLines."""
        check = FileCheck(batch.endpoint, self._config.storage.max_batch_lines, self.max_line_bytes)
        renew_s = time.monotonic() + self.write_s
        async for lines in self.file_lines(batch):
            await asyncio.to_thread(check.add, lines)
            if time.monotonic() >= renew_s:
                with contextlib.suppress(NotReady):
                    await self.storage.answer(batch.id, self.holder, [], self.max_tenant_bytes)
                renew_s = time.monotonic() + self.write_s
        return check

    async def file_lines(self, batch: Batch) -> AsyncGenerator[list[NumberedBatchLine]]:
        """The lines of a batch's file, part by part, without empty ones. Raises NotFound, TooManyLines."""
        splitter, number = LineSplitter(self.max_line_bytes, self._config.storage.max_batch_lines), 0
        while (part := await self._part(batch, number)) is not None:
            yield await asyncio.to_thread(splitter.push, part)
            number += 1
        yield splitter.end()

    async def _part(self, batch: Batch, number: int) -> bytes | None:
        while True:
            try:
                return await self.storage.file_part(batch.input_file_id, number, tenant_id=batch.tenant_id)
            except NotReady as error:
                logger.info("reading the file of batch %s is retried: %s", batch.id, error)
                await asyncio.sleep(self.write_s)

    async def _refuse(self, batch: Batch, errors: list[FileError]) -> None:
        await self.storage.finish(batch.id, self.holder, "failed", json.dumps([error._asdict() for error in errors]))


class _BatchRun:
    """One batch while this process holds its lease."""

    def __init__(self, runner: BatchRunner, batch: Batch, written: set[int], num_workers: int) -> None:
        """`written`: numbers of the lines that have an answer; grows with each write."""
        self._runner, self._batch = runner, batch
        self._written, self._num_workers = written, num_workers
        self._lines = self._unwritten()
        self._lines_lock = asyncio.Lock()  # held while a worker takes the next line
        self._answers: list[LineResult] = []

    async def run(self) -> None:
        """Raises NotFound if the file is deleted meanwhile, LeaseLost, NotReady."""
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
        """The lines that have no answer when their part of the file is read."""
        batch, max_bytes = self._batch, self._runner.max_line_bytes
        async for lines in self._runner.file_lines(batch):
            for number, text in [line for line in lines if line.number not in self._written]:
                parse = partial(parse_line, number, text, batch.endpoint, max_bytes)
                found = await in_worker_if_long(len(text), parse)
                assert isinstance(found, BatchLine), "the file was validated, and files are immutable"
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
            async with self._lines_lock:
                line = await anext(self._lines, None)
            if line is None:
                return
            self._answers.append(await self._answer(line))

    async def _answer(self, line: BatchLine) -> LineResult:
        request_id = f"{self._batch.id}-{line.number}"
        pauses_s, num_unread, num_timeouts = backoff_s(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0, 0
        while True:
            try:
                async with self._runner.slots:
                    caller = self._runner.caller_of(self._batch)  # with its present limits and permissions
                    if not isinstance(caller, Principal):
                        return unfinished_line(line, caller)
                    body = await self._runner.answer(self._batch.endpoint, line.body, caller, request_id)
                return await in_worker_if_long(len(body), partial(result_line, line, request_id, body))
            except Exception as error:  # any error becomes this line's answer, unless it is transient
                num_unread += isinstance(error, ADAPTER_ERRORS)
                num_timeouts += isinstance(error, DeadlineExceeded) and error.num_tokens > 0  # which were charged
                if not is_transient(error) or num_unread >= MAX_TRIES or num_timeouts >= MAX_TIMEOUTS:
                    return error_line(line, request_id, error)
                retry_after_s = getattr(error, "retry_after_s", None) or 0.0
                await asyncio.sleep(min(max(next(pauses_s), retry_after_s), LONGEST_PAUSE_S))

    async def _write(self) -> None:
        """Write some answers and renew the lease; keeps them while the database is unavailable."""
        sizes = accumulate(len(line.line) for line in self._answers[:_LINES_AT_ONCE])
        num_fitting = sum(size <= _BYTES_AT_ONCE for size in sizes)
        lines = self._answers[: max(num_fitting, 1)]
        try:
            self._batch = await self._runner.storage.answer(
                self._batch.id, self._runner.holder, lines, self._runner.max_tenant_bytes
            )
        except NotReady as error:
            logger.info("writing the answers of batch %s is retried: %s", self._batch.id, error)
            await asyncio.sleep(self._runner.write_s)
            return
        self._written.update(line.number for line in lines)
        del self._answers[: len(lines)]


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, LimitError):
        return error.retry_after_s is not None
    return isinstance(error, (ServerOverloaded, DeadlineExceeded, *ADAPTER_ERRORS))
