"""Files in the database, in parts: what clients upload for batches, and the output of batches.

A file exists once all its parts do; before that, it only counts towards the tenant's bytes. A batch's output has no
parts: its contents are the lines in `batch_lines`, and it exists once the batch has ended. Every call is one
transaction; an expired file is NotFound.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, fields

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update
from sqlalchemy.engine import RowMapping

from app.deployments.object_storage.models import OPEN, FilePage, StorageQuotaExceeded, StoredFile
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.storage_tables import batch_lines, batches, file_parts, files
from app.deployments.registry.db.tables import rows_after
from app.deployments.registry.models import not_found_error
from app.engine.errors import InvalidRequest

#: Bytes in a part of an uploaded file; input lines in a part of a batch's output.
PART_BYTES, PART_LINES = 1 << 20, 256
#: How long an upload may take; unfinished ones are deleted after it.
ARRIVAL_S = 3600.0


class FileStore:
    """Raises NotFound for what the tenant does not have."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(
        self, tenant_id: str, filename: str, purpose: str, size_bytes: int, life_s: float, max_bytes: int
    ) -> StoredFile:
        """Reserve space for an upload. Raises StorageQuotaExceeded if the tenant would store more than `max_bytes`."""
        now_s = self._database.clock()
        with self._database.write() as connection:
            self.check_room(connection, tenant_id, size_bytes, max_bytes, "the file has")
            file = StoredFile(f"file-{secrets.token_hex(12)}", filename, purpose, size_bytes, now_s, now_s + life_s)
            self.insert(connection, tenant_id, file, num_parts=None)
        return file

    def check_room(self, connection: Connection, tenant_id: str, size_bytes: int, max_bytes: int, what: str) -> None:
        """Raises StorageQuotaExceeded, with a message that begins with `what`, if the tenant would store more than
        `max_bytes`. Part of the caller's transaction."""
        present = self._present(tenant_id, self._database.clock())
        used_bytes = connection.scalar(select(func.sum(files.c.size_bytes)).where(*present)) or 0
        if used_bytes + size_bytes > max_bytes:
            raise StorageQuotaExceeded(
                f"{what} {size_bytes} bytes but {max(0, max_bytes - used_bytes)} are left of storage.max_tenant_bytes "
                f"{max_bytes}; delete files, or have them expire sooner"
            )

    def extend_output(self, connection: Connection, batch: RowMapping, size_bytes: int, *, is_error: bool) -> None:
        """Count lines that are written to a batch's output or error file; part of the caller's transaction."""
        size = files.c.size_bytes + size_bytes
        where = (files.c.base_digest == self._database.base_digest, *_output(batch["id"], is_error=is_error))
        if not connection.execute(update(files).where(*where).values(size_bytes=size)).rowcount:
            name, id_ = f"{batch['id']}_{'error' if is_error else 'output'}.jsonl", f"file-{secrets.token_hex(12)}"
            now_s, expires_s = self._database.clock(), batch["expires_s"] + batch["output_life_s"]
            file = StoredFile(id_, name, "batch_output", size_bytes, now_s, expires_s, batch["id"], is_error)
            self.insert(connection, batch["tenant_id"], file, num_parts=None)

    def end_output(self, connection: Connection, batch: RowMapping, *, is_error: bool) -> str | None:
        """Have a batch's output or error file exist from now on; its id, or None if it has no lines. Part of the
        caller's transaction."""
        where = (files.c.base_digest == self._database.base_digest, *_output(batch["id"], is_error=is_error))
        file_id: str | None = connection.scalar(select(files.c.id).where(*where))
        lines = self._lines(batch["id"], is_error=is_error)
        last = connection.scalar(select(func.max(batch_lines.c.number)).where(*lines))  # empty lines have numbers, too
        now_s, num_parts = self._database.clock(), 0 if last is None else last // PART_LINES + 1
        values = {"num_parts": num_parts, "created_s": now_s, "expires_s": now_s + batch["output_life_s"]}
        connection.execute(update(files).where(*where).values(**values))
        return file_id

    def insert(self, connection: Connection, tenant_id: str, file: StoredFile, num_parts: int | None) -> None:
        """Part of the caller's transaction."""
        place = {"base_digest": self._database.base_digest, "tenant_id": tenant_id, "num_parts": num_parts}
        connection.execute(insert(files).values(**place, **asdict(file)))

    def add_part(self, file_id: str, number: int, content: bytes) -> None:
        with self._database.write() as connection:
            connection.execute(
                insert(file_parts).values(
                    base_digest=self._database.base_digest, file_id=file_id, number=number, content=content
                )
            )

    def end(self, file_id: str, num_parts: int, *, tenant_id: str) -> None:
        """Mark an upload as complete: the file exists from now on."""
        with self._database.write() as connection:
            connection.execute(
                update(files)
                .where(files.c.base_digest == self._database.base_digest, files.c.tenant_id == tenant_id)
                .where(files.c.id == file_id)
                .values(num_parts=num_parts)
            )

    def get(self, file_id: str, *, tenant_id: str) -> StoredFile:
        with self._database.read() as connection:
            return _file(self.row(connection, file_id, tenant_id))

    def page(self, *, tenant_id: str, limit: int, after: str | None, purpose: str | None, newest: bool) -> FilePage:
        """Raises NotFound if there is no file `after`."""
        now_s = self._database.clock()
        query = select(files).where(*self._present(tenant_id, now_s), files.c.num_parts.is_not(None))
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        with self._database.read() as connection:
            last = None if after is None else self.row(connection, after, tenant_id)
            query = rows_after(query, files, last, is_newest_first=newest).limit(limit + 1)
            rows = connection.execute(query).mappings().all()
        return FilePage(tuple(_file(row) for row in rows[:limit]), len(rows) > limit)

    def delete(self, file_id: str, *, tenant_id: str) -> None:
        """Raises InvalidRequest while a batch reads it."""
        with self._database.write() as connection:
            row = self.row(connection, file_id, tenant_id)
            reading = select(batches.c.id).where(
                batches.c.base_digest == self._database.base_digest,
                batches.c.tenant_id == tenant_id,
                batches.c.input_file_id == file_id,
                batches.c.status.in_(OPEN),
            )
            batch_id = connection.scalar(reading.limit(1))
            if batch_id is not None:
                raise InvalidRequest(f"batch {batch_id} reads file {file_id}; cancel the batch first", param="file_id")
            self.forget(connection, row)

    def forget(self, connection: Connection, row: RowMapping) -> None:
        """Delete a file and its contents; part of the caller's transaction."""
        base_digest = self._database.base_digest
        parts = delete(file_parts).where(file_parts.c.base_digest == base_digest, file_parts.c.file_id == row["id"])
        if row["batch_id"] is not None:
            parts = delete(batch_lines).where(*self._lines(row["batch_id"], is_error=row["is_error"]))
        connection.execute(parts)
        connection.execute(delete(files).where(files.c.base_digest == base_digest, files.c.id == row["id"]))

    def part(self, file_id: str, number: int, *, tenant_id: str) -> bytes | None:
        """A part of the contents; None after the last one."""
        with self._database.read() as connection:
            row = self.row(connection, file_id, tenant_id)
            if not 0 <= number < row["num_parts"]:
                return None
            if row["batch_id"] is None:
                query = select(file_parts.c.content).where(
                    file_parts.c.base_digest == self._database.base_digest,
                    file_parts.c.file_id == file_id,
                    file_parts.c.number == number,
                )
                content: bytes = connection.execute(query).scalar_one()
                return bytes(content)
            first = number * PART_LINES
            lines = select(batch_lines.c.line).where(
                *self._lines(row["batch_id"], is_error=row["is_error"]),
                batch_lines.c.number >= first,
                batch_lines.c.number < first + PART_LINES,
            )
            return "".join(f"{line}\n" for line in connection.scalars(lines.order_by(batch_lines.c.number))).encode()

    def expired_rows(self, connection: Connection) -> list[RowMapping]:
        """Expired files and abandoned uploads, at most 100."""
        now_s = self._database.clock()
        has_expired = (files.c.expires_s <= now_s) | (
            files.c.num_parts.is_(None) & files.c.batch_id.is_(None) & (files.c.created_s <= now_s - ARRIVAL_S)
        )
        query = select(files).where(files.c.base_digest == self._database.base_digest, has_expired)
        return list(connection.execute(query.limit(100)).mappings().all())

    def row(self, connection: Connection, file_id: str, tenant_id: str) -> RowMapping:
        """Part of the caller's transaction."""
        present = self._present(tenant_id, self._database.clock())
        query = select(files).where(*present, files.c.id == file_id, files.c.num_parts.is_not(None))
        row = connection.execute(query).mappings().first()
        if row is None:
            raise not_found_error("file", file_id)
        return row

    def _present(self, tenant_id: str, now_s: float) -> tuple[ColumnElement[bool], ...]:
        mine = (files.c.base_digest == self._database.base_digest, files.c.tenant_id == tenant_id)
        return (*mine, files.c.expires_s > now_s)

    def _lines(self, batch_id: str, *, is_error: bool) -> tuple[ColumnElement[bool], ...]:
        return (
            batch_lines.c.base_digest == self._database.base_digest,
            batch_lines.c.batch_id == batch_id,
            batch_lines.c.is_error == is_error,
        )


def _output(batch_id: str, *, is_error: bool) -> tuple[ColumnElement[bool], ...]:
    return (files.c.batch_id == batch_id, files.c.is_error == is_error)


def _file(row: RowMapping) -> StoredFile:
    return StoredFile(**{field.name: row[field.name] for field in fields(StoredFile)})
