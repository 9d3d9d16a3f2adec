"""How every ingress asks for what is kept for clients: a typed method per call.

In: the actor that keeps it. Out: what `KeptService` answers, or the exception that it raised. Every method has the name
and the signature of the service's; mypy checks each call against it. All of them raise ActorAway (a NotReady) while the
actor restarts.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.deployments.kept.entries import (
    Batch,
    BatchPage,
    BatchStatus,
    FilePage,
    KeptFile,
    KeptResponse,
    LineAnswer,
    NewBatch,
)
from app.deployments.kept.service import KeptService as _Service
from app.deployments.links.ray_calls import Callee


class KeptClient:
    """Several may share an actor."""

    def __init__(self, keeper: Callee) -> None:
        self._keeper = keeper

    async def begin_file(
        self, filename: str, purpose: str, size_bytes: int, *, tenant_id: str, life_s: float, max_bytes: int
    ) -> KeptFile:
        """Make room for a file, whose parts follow. Raises KeptQuotaReached."""
        return await self._keeper.call(
            _Service.begin_file, filename, purpose, size_bytes, tenant_id=tenant_id, life_s=life_s, max_bytes=max_bytes
        )

    async def add_part(self, file_id: str, number: int, content: bytes) -> None:
        """One part of a file."""
        await self._keeper.call(_Service.add_part, file_id, number, content)

    async def end_file(self, file_id: str, num_parts: int, *, tenant_id: str) -> None:
        """All parts have come: the file is there."""
        await self._keeper.call(_Service.end_file, file_id, num_parts, tenant_id=tenant_id)

    async def file(self, file_id: str, *, tenant_id: str) -> KeptFile:
        """Raises NotFound."""
        return await self._keeper.call(_Service.file, file_id, tenant_id=tenant_id)

    async def file_page(
        self, *, tenant_id: str, limit: int, after: str | None, purpose: str | None, newest: bool
    ) -> FilePage:
        """Raises NotFound if there is no file `after`."""
        return await self._keeper.call(
            _Service.file_page, tenant_id=tenant_id, limit=limit, after=after, purpose=purpose, newest=newest
        )

    async def delete_file(self, file_id: str, *, tenant_id: str) -> None:
        """Raises NotFound, and InvalidRequest while a batch reads it."""
        await self._keeper.call(_Service.delete_file, file_id, tenant_id=tenant_id)

    async def file_part(self, file_id: str, number: int, *, tenant_id: str) -> bytes | None:
        """A part of the contents; None behind the last. Raises NotFound."""
        return await self._keeper.call(_Service.file_part, file_id, number, tenant_id=tenant_id)

    async def create_batch(self, wanted: NewBatch) -> Batch:
        """Raises NotFound for its file, InvalidRequest, KeptQuotaReached."""
        return await self._keeper.call(_Service.create_batch, wanted)

    async def batch(self, batch_id: str, *, tenant_id: str) -> Batch:
        """Raises NotFound."""
        return await self._keeper.call(_Service.batch, batch_id, tenant_id=tenant_id)

    async def batch_page(self, *, tenant_id: str, limit: int, after: str | None) -> BatchPage:
        """Raises NotFound if there is no batch `after`."""
        return await self._keeper.call(_Service.batch_page, tenant_id=tenant_id, limit=limit, after=after)

    async def cancel_batch(self, batch_id: str, *, tenant_id: str) -> Batch:
        """Whoever works on it ends it soon. Raises NotFound."""
        return await self._keeper.call(_Service.cancel_batch, batch_id, tenant_id=tenant_id)

    async def claim(self, holder: str) -> Batch | None:
        """A batch to work on, if there is one."""
        return await self._keeper.call(_Service.claim, holder)

    async def begin_batch(self, batch_id: str, holder: str, num_lines: int) -> Batch:
        """Its file is well formed. Raises LeaseLost."""
        return await self._keeper.call(_Service.begin_batch, batch_id, holder, num_lines)

    async def answered(self, batch_id: str) -> list[int]:
        """The numbers of the lines that have an answer."""
        return await self._keeper.call(_Service.answered, batch_id)

    async def answer(self, batch_id: str, holder: str, lines: Sequence[LineAnswer]) -> Batch:
        """Write answers down, and renew the lease. Raises LeaseLost."""
        return await self._keeper.call(_Service.answer, batch_id, holder, lines)

    async def finish(self, batch_id: str, holder: str, status: BatchStatus, errors: str = "[]") -> Batch:
        """The last status: its answers become files. Raises LeaseLost."""
        return await self._keeper.call(_Service.finish, batch_id, holder, status, errors)

    async def release(self, holder: str) -> None:
        """Leave all batches of a holder to others."""
        await self._keeper.call(_Service.release, holder)

    async def keep_response(
        self, response: KeptResponse, *, tenant_id: str, life_s: float, max_count: int, max_bytes: int
    ) -> None:
        """The oldest go beyond `max_count` or `max_bytes`."""
        await self._keeper.call(
            _Service.keep_response,
            response,
            tenant_id=tenant_id,
            life_s=life_s,
            max_count=max_count,
            max_bytes=max_bytes,
        )

    async def response(self, response_id: str, *, tenant_id: str) -> KeptResponse:
        """Raises NotFound."""
        return await self._keeper.call(_Service.response, response_id, tenant_id=tenant_id)

    async def delete_response(self, response_id: str, *, tenant_id: str) -> None:
        """Raises NotFound."""
        await self._keeper.call(_Service.delete_response, response_id, tenant_id=tenant_id)
