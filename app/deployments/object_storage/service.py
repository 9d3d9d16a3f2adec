"""The calls of the object storage. It runs in the store's process, beside the registry; ingresses hold it as an
`actor_proxy`.

It has no state of its own: when a call returns, its change is in the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from app.deployments.object_storage.models import (
    Batch,
    BatchPage,
    BatchStatus,
    FilePage,
    LineResult,
    NewBatch,
    StoredFile,
    StoredResponse,
)
from app.deployments.rpc.actor_proxy import remote_method

if TYPE_CHECKING:  # processes that only call it need no database package
    from app.deployments.object_storage.storage import Storage

#: How often expired objects are deleted.
SWEEP_INTERVAL_S = 300.0


class StorageService:
    """`open_storage` is called once, at the first call. `clock` gives monotonic seconds."""

    def __init__(self, open_storage: Callable[[], Storage], clock: Callable[[], float] = time.monotonic) -> None:
        self._open_storage = open_storage
        self._opened: Storage | None = None
        self._clock = clock
        self._swept_s = clock()

    @property
    def _storage(self) -> Storage:
        self._opened = self._opened or self._open_storage()
        return self._opened

    @remote_method
    async def begin_file(
        self, filename: str, purpose: str, size_bytes: int, *, tenant_id: str, life_s: float, max_bytes: int
    ) -> StoredFile:
        """Reserve space for a file whose parts follow. Raises StorageQuotaExceeded."""
        return await asyncio.to_thread(
            self._storage.files.begin, tenant_id, filename, purpose, size_bytes, life_s, max_bytes
        )

    @remote_method
    async def add_part(self, file_id: str, number: int, content: bytes) -> None:
        await asyncio.to_thread(self._storage.files.add_part, file_id, number, content)

    @remote_method
    async def end_file(self, file_id: str, num_parts: int, *, tenant_id: str) -> None:
        """All parts have arrived: the file exists from now on."""
        await asyncio.to_thread(self._storage.files.end, file_id, num_parts, tenant_id=tenant_id)

    @remote_method
    async def file(self, file_id: str, *, tenant_id: str) -> StoredFile:
        """Raises NotFound."""
        return await asyncio.to_thread(self._storage.files.get, file_id, tenant_id=tenant_id)

    @remote_method
    async def file_page(
        self, *, tenant_id: str, limit: int, after: str | None, purpose: str | None, newest: bool
    ) -> FilePage:
        """Raises NotFound if there is no file `after`."""
        return await asyncio.to_thread(
            self._storage.files.page, tenant_id=tenant_id, limit=limit, after=after, purpose=purpose, newest=newest
        )

    @remote_method
    async def delete_file(self, file_id: str, *, tenant_id: str) -> None:
        """Raises NotFound, and InvalidRequest while a batch reads it."""
        await asyncio.to_thread(self._storage.files.delete, file_id, tenant_id=tenant_id)

    @remote_method
    async def file_part(self, file_id: str, number: int, *, tenant_id: str) -> bytes | None:
        """A part of the contents; None after the last one. Raises NotFound."""
        return await asyncio.to_thread(self._storage.files.part, file_id, number, tenant_id=tenant_id)

    @remote_method
    async def create_batch(self, new_batch: NewBatch) -> Batch:
        """Raises NotFound for its file, InvalidRequest, StorageQuotaExceeded."""
        return await asyncio.to_thread(self._storage.batches.create, new_batch)

    @remote_method
    async def batch(self, batch_id: str, *, tenant_id: str) -> Batch:
        """Raises NotFound."""
        return await asyncio.to_thread(self._storage.batches.get, batch_id, tenant_id=tenant_id)

    @remote_method
    async def batch_page(self, *, tenant_id: str, limit: int, after: str | None) -> BatchPage:
        """Raises NotFound if there is no batch `after`."""
        return await asyncio.to_thread(self._storage.batches.page, tenant_id=tenant_id, limit=limit, after=after)

    @remote_method
    async def cancel_batch(self, batch_id: str, *, tenant_id: str) -> Batch:
        """The process that works on it ends it soon. Raises NotFound."""
        return await asyncio.to_thread(self._storage.batches.cancel, batch_id, tenant_id=tenant_id)

    @remote_method
    async def open_batches(self, key_ids: Sequence[str], *, tenant_id: str) -> list[str]:
        """Ids of the batches of these keys that have not ended."""
        return await asyncio.to_thread(self._storage.batches.open_ids, key_ids, tenant_id=tenant_id)

    @remote_method
    async def claim(self, holder: str) -> Batch | None:
        """A batch to work on, or None; also deletes expired objects now and then."""
        if self._clock() - self._swept_s >= SWEEP_INTERVAL_S:
            self._swept_s = self._clock()
            await asyncio.to_thread(self._storage.sweep)
        return await asyncio.to_thread(self._storage.batches.claim, holder)

    @remote_method
    async def begin_batch(self, batch_id: str, holder: str, num_lines: int) -> Batch:
        """Note that the input file is valid. Raises LeaseLost."""
        return await asyncio.to_thread(self._storage.batches.begin, batch_id, holder, num_lines)

    @remote_method
    async def answered_lines(self, batch_id: str) -> list[int]:
        """The numbers of the lines that have an answer."""
        return await asyncio.to_thread(self._storage.batches.answered_lines, batch_id)

    @remote_method
    async def answer(self, batch_id: str, holder: str, lines: Sequence[LineResult], max_bytes: int) -> Batch:
        """Store answers and renew the lease. Raises LeaseLost, and StorageQuotaExceeded beyond the tenant's
        `max_bytes`."""
        return await asyncio.to_thread(self._storage.batches.answer, batch_id, holder, lines, max_bytes)

    @remote_method
    async def finish(self, batch_id: str, holder: str, status: BatchStatus, errors: str = "[]") -> Batch:
        """Set the final status and make files of the answers. Raises LeaseLost."""
        return await asyncio.to_thread(self._storage.batches.finish, batch_id, holder, status, errors)

    @remote_method
    async def release(self, holder: str) -> None:
        """Give up all leases of a process."""
        await asyncio.to_thread(self._storage.batches.release, holder)

    @remote_method
    async def keep_response(
        self, response: StoredResponse, *, tenant_id: str, life_s: float, max_count: int, max_bytes: int
    ) -> None:
        """Deletes the tenant's oldest responses beyond `max_count` or `max_bytes`."""
        keep = self._storage.responses.keep
        await asyncio.to_thread(
            keep, response, tenant_id=tenant_id, life_s=life_s, max_count=max_count, max_bytes=max_bytes
        )

    @remote_method
    async def response(self, response_id: str, *, tenant_id: str) -> StoredResponse:
        """Raises NotFound."""
        return await asyncio.to_thread(self._storage.responses.get, response_id, tenant_id=tenant_id)

    @remote_method
    async def delete_response(self, response_id: str, *, tenant_id: str) -> None:
        """Raises NotFound."""
        await asyncio.to_thread(self._storage.responses.delete, response_id, tenant_id=tenant_id)
