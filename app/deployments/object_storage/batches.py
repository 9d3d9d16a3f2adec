"""Batches in the database: created by clients, worked on by one process at a time, answered line by line.

A process that works on a batch holds a lease, which each of its writes renews. When the process dies, the lease expires
and another process continues with the lines that have no answer yet. A lease has expired when its row has not changed
for `LEASE_S`, measured by the observer's own monotonic clock, so that clocks of different machines are never compared.
Every call is one transaction. The first answer that is written for a line stays; a write without the lease raises
LeaseLost.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, case, delete, func, insert, or_, select, update
from sqlalchemy.engine import RowMapping

from app.deployments.object_storage.files import FileStore
from app.deployments.object_storage.models import (
    OPEN,
    Batch,
    BatchPage,
    BatchStatus,
    LeaseLost,
    LineResult,
    NewBatch,
    StorageQuotaExceeded,
    unsupported_purpose_error,
)
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.storage_tables import batch_lines, batches, files
from app.deployments.registry.db.tables import rows_after
from app.deployments.registry.models import not_found_error

#: How long a batch stays with a process that writes nothing.
LEASE_S = 30.0
#: Batches of one tenant that a process works on at a time: those that wait for their tenant's limits leave others room.
MAX_PER_TENANT = 4


class _LeaseSighting(NamedTuple):
    """A lease as it was last read, and since when it has been unchanged, by the reader's clock."""

    owner: str
    lease_s: float
    since_s: float


class BatchStore:
    """Raises NotFound for what the tenant does not have. `monotonic` gives seconds that clock changes do not affect."""

    def __init__(
        self, database: Database, file_store: FileStore, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._files = file_store
        self._monotonic = monotonic
        self._seen: dict[str, _LeaseSighting] = {}  # batch id -> its lease when `claim` last looked

    def create(self, new_batch: NewBatch) -> Batch:
        """Raises StorageQuotaExceeded if the tenant has `max_open` batches that have not ended, or stores as much as it
        may."""
        now_s = self._database.clock()
        with self._database.write() as connection:
            row = self._files.row(connection, new_batch.input_file_id, new_batch.tenant_id)
            if row["purpose"] != "batch":
                raise unsupported_purpose_error(row["purpose"])
            mine = (*self._ours(), batches.c.tenant_id == new_batch.tenant_id, batches.c.status.in_(OPEN))
            num_open = connection.scalar(select(func.count()).select_from(batches).where(*mine)) or 0
            if num_open >= new_batch.max_open:
                raise StorageQuotaExceeded(
                    f"{num_open} batches have not ended, as many as storage.max_open_batches allows; wait for one, or "
                    "cancel one"
                )
            self._files.check_room(
                connection, new_batch.tenant_id, 1, new_batch.max_bytes, "a batch's output has at least"
            )
            batch_id = f"batch_{secrets.token_hex(12)}"
            connection.execute(
                insert(batches).values(
                    base_digest=self._database.base_digest,
                    id=batch_id,
                    **{name: value for name, value in asdict(new_batch).items() if name in batches.c},
                    status="validating",
                    created_s=now_s,
                    expires_s=now_s + new_batch.window_s,
                    num_lines=0,
                    num_completed=0,
                    num_failed=0,
                    errors="[]",
                    owner="",
                    lease_s=0.0,
                )
            )
            return _batch(self._row(connection, batch_id, new_batch.tenant_id))

    def get(self, batch_id: str, *, tenant_id: str) -> Batch:
        with self._database.read() as connection:
            return _batch(self._row(connection, batch_id, tenant_id))

    def page(self, *, tenant_id: str, limit: int, after: str | None) -> BatchPage:
        """Raises NotFound if there is no batch `after`."""
        query = select(batches).where(*self._ours(), batches.c.tenant_id == tenant_id)
        with self._database.read() as connection:
            last = None if after is None else self._row(connection, after, tenant_id)
            query = rows_after(query, batches, last, is_newest_first=True).limit(limit + 1)
            rows = connection.execute(query).mappings().all()
        return BatchPage(tuple(_batch(row) for row in rows[:limit]), len(rows) > limit)

    def cancel(self, batch_id: str, *, tenant_id: str) -> Batch:
        """The process that works on it ends it soon; a batch that has ended stays as it is."""
        with self._database.write() as connection:
            row = self._row(connection, batch_id, tenant_id)
            if row["status"] in ("validating", "in_progress"):
                self._set(connection, batch_id, status="cancelling", cancelling_s=self._database.clock())
            return _batch(self._row(connection, batch_id, tenant_id))

    def open_ids(self, key_ids: Collection[str], *, tenant_id: str) -> list[str]:
        """The batches of these keys that have not ended, oldest first."""
        mine = (*self._open(), batches.c.tenant_id == tenant_id, batches.c.key_id.in_(key_ids))
        with self._database.read() as connection:
            return list(
                connection.scalars(select(batches.c.id).where(*mine).order_by(batches.c.created_s, batches.c.id))
            )

    # What follows is called by processes that work on batches.

    def claim(self, holder: str) -> Batch | None:
        """Take over a batch without a valid lease: the oldest one of the tenant with the fewest batches in work, but of
        none with `MAX_PER_TENANT` in work here."""
        mine = select(batches.c.tenant_id).where(*self._open(), batches.c.owner == holder).group_by(batches.c.tenant_id)
        has_room = batches.c.tenant_id.not_in(mine.having(func.count() >= MAX_PER_TENANT))
        with self._database.read() as connection:  # the usual case, without the writers' lock: there is none
            free = self._free(self._expired_leases(connection))
            if connection.scalar(select(batches.c.id).where(*self._open(), free, has_room).limit(1)) is None:
                return None
        with self._database.write() as connection:
            free = self._free(self._expired_leases(connection))
            worked = (
                select(batches.c.tenant_id, func.sum(case((free, 0), else_=1)).label("num"))
                .where(*self._open())
                .group_by(batches.c.tenant_id)
                .subquery()
            )
            query = (
                select(batches)
                .join(worked, worked.c.tenant_id == batches.c.tenant_id)
                .where(*self._open(), free, has_room)
                .order_by(worked.c.num, batches.c.created_s, batches.c.id)
            )
            row = connection.execute(query.limit(1)).mappings().first()
            if row is None:
                return None
            self._set(connection, row["id"], owner=holder, lease_s=self._next_lease_s())
            return _batch(row)

    def begin(self, batch_id: str, holder: str, num_lines: int) -> Batch:
        """Note that the input file is valid and has this many lines."""
        with self._database.write() as connection:
            row = self._leased_row(connection, batch_id, holder)
            if row["status"] == "validating":
                status, began_s = "in_progress", self._database.clock()
                self._set(connection, batch_id, status=status, began_s=began_s, num_lines=num_lines)
            return _batch(self._leased_row(connection, batch_id, holder))

    def answered_lines(self, batch_id: str) -> list[int]:
        """The numbers of the lines that have an answer."""
        with self._database.read() as connection:
            return list(connection.scalars(select(batch_lines.c.number).where(*self._lines(batch_id))))

    def answer(self, batch_id: str, holder: str, lines: Sequence[LineResult], max_bytes: int) -> Batch:
        """Store answers and renew the lease; `lines` may be empty. Raises StorageQuotaExceeded, and stores nothing, if
        the tenant would store more than `max_bytes`."""
        with self._database.write() as connection:
            row = self._leased_row(connection, batch_id, holder)
            numbers = [line.number for line in lines]
            there = select(batch_lines.c.number).where(*self._lines(batch_id), batch_lines.c.number.in_(numbers))
            known = set(connection.scalars(there)) if lines else set()
            new = [line for line in lines if line.number not in known]
            if new:
                sizes = {is_error: _num_bytes(new, is_error=is_error) for is_error in (False, True)}
                answers_bytes = sum(sizes.values())
                self._files.check_room(
                    connection, row["tenant_id"], answers_bytes, max_bytes, "the batch's answers have"
                )
                values = [line._asdict() | {"batch_id": batch_id} for line in new]
                place = {"base_digest": self._database.base_digest}
                connection.execute(insert(batch_lines), [place | value for value in values])
                for is_error, size_bytes in sizes.items():
                    if size_bytes:
                        self._files.extend_output(connection, row, size_bytes, is_error=is_error)
            num_failed = sum(line.is_error for line in new)
            self._set(
                connection,
                batch_id,
                lease_s=self._next_lease_s(),
                num_failed=row["num_failed"] + num_failed,
                num_completed=row["num_completed"] + len(new) - num_failed,
            )
            return _batch(self._leased_row(connection, batch_id, holder))

    def finish(self, batch_id: str, holder: str, status: BatchStatus, errors: str = "[]") -> Batch:
        """Set the final status and make files of the answers."""
        now_s = self._database.clock()
        with self._database.write() as connection:
            row = self._leased_row(connection, batch_id, holder)
            file_ids: dict[str, str] = {}
            for is_error, column in ((False, "output_file_id"), (True, "error_file_id")):
                if (file_id := self._files.end_output(connection, row, is_error=is_error)) is not None:
                    file_ids[column] = file_id
            self._set(
                connection, batch_id, status=status, ended_s=now_s, errors=errors, lease_s=0.0, owner="", **file_ids
            )
            return _batch(self._row(connection, batch_id, row["tenant_id"]))

    def release(self, holder: str) -> None:
        """Give up all leases of a process that ends, so that others can claim its batches at once."""
        with self._database.write() as connection:
            mine = (*self._ours(), batches.c.owner == holder)
            connection.execute(update(batches).where(*mine).values(lease_s=0.0, owner=""))

    def forget_before(self, connection: Connection, created_s: float) -> None:
        """Delete batches so old that none of their files is left."""
        old = select(batches.c.id).where(*self._ours(), batches.c.created_s < created_s, batches.c.status.not_in(OPEN))
        ids = list(connection.scalars(old.limit(100)))
        base_digest = self._database.base_digest
        connection.execute(
            delete(batch_lines).where(batch_lines.c.base_digest == base_digest, batch_lines.c.batch_id.in_(ids))
        )
        connection.execute(delete(files).where(files.c.base_digest == base_digest, files.c.batch_id.in_(ids)))
        connection.execute(delete(batches).where(*self._ours(), batches.c.id.in_(ids)))

    def _expired_leases(self, connection: Connection) -> list[str]:
        """Batches whose lease has not changed for `LEASE_S`."""
        query = select(batches.c.id, batches.c.owner, batches.c.lease_s).where(*self._open(), batches.c.lease_s > 0.0)
        query_began_s, rows, before = self._monotonic(), connection.execute(query).all(), self._seen
        query_ended_s = self._monotonic()
        seen: dict[str, _LeaseSighting] = {}
        for batch_id, owner, lease_s in rows:
            new = _LeaseSighting(owner, lease_s, query_ended_s)
            old = before.get(batch_id, new)
            seen[batch_id] = old if old[:2] == new[:2] else new
        self._seen = seen
        return [batch_id for batch_id, row in seen.items() if query_began_s - row.since_s >= LEASE_S]

    def _next_lease_s(self) -> float:
        """A value that differs from the last one; nothing else about it matters."""
        return self._database.clock() + LEASE_S

    def _leased_row(self, connection: Connection, batch_id: str, holder: str) -> RowMapping:
        query = select(batches).where(*self._ours(), batches.c.id == batch_id, batches.c.owner == holder)
        row = connection.execute(query).mappings().first()
        if row is None:
            raise LeaseLost(f"batch {batch_id} is now processed by another worker")
        return row

    def _row(self, connection: Connection, batch_id: str, tenant_id: str) -> RowMapping:
        query = select(batches).where(*self._ours(), batches.c.tenant_id == tenant_id, batches.c.id == batch_id)
        row = connection.execute(query).mappings().first()
        if row is None:
            raise not_found_error("batch", batch_id)
        return row

    def _set(self, connection: Connection, batch_id: str, **values: object) -> None:
        connection.execute(update(batches).where(*self._ours(), batches.c.id == batch_id).values(**values))

    def _ours(self) -> tuple[ColumnElement[bool], ...]:
        return (batches.c.base_digest == self._database.base_digest,)

    def _open(self) -> tuple[ColumnElement[bool], ...]:
        return (*self._ours(), batches.c.status.in_(OPEN))

    def _free(self, expired: Collection[str]) -> ColumnElement[bool]:
        return or_(batches.c.lease_s == 0.0, batches.c.id.in_(expired))

    def _lines(self, batch_id: str) -> tuple[ColumnElement[bool], ...]:
        return (batch_lines.c.base_digest == self._database.base_digest, batch_lines.c.batch_id == batch_id)


def _num_bytes(lines: Sequence[LineResult], *, is_error: bool) -> int:
    """Bytes of these lines, which are ASCII, in their file."""
    return sum(len(line.line) + 1 for line in lines if line.is_error == is_error)


def _batch(row: RowMapping) -> Batch:
    return Batch(**{field.name: row[field.name] for field in fields(Batch)})
