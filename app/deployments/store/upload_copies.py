"""Copies of uploaded adapters in a registry's database that other machines reach, where stores there find them.

A copy is in `file_parts` under the upload's digest: part 0 is adapter_config.json, which is written last, the others
are the weights in order. Files of batches have ids of another length.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sqlalchemy import ColumnElement, delete, func, insert, select

from app.deployments.object_storage.files import PART_BYTES
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.storage_tables import file_parts
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME

_DIGEST_CHARS = 64


class UploadCopies:
    """Called from any thread; every call raises NotReady while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def digests(self) -> frozenset[str]:
        """The uploads of which there is a copy, or a part of one."""
        query = select(file_parts.c.file_id).where(
            file_parts.c.base_digest == self._database.base_digest,
            func.length(file_parts.c.file_id) == _DIGEST_CHARS,
        )
        with self._database.read() as connection:
            return frozenset(connection.scalars(query.distinct()))

    def add(self, digest: str, folder: Path) -> None:
        """Copy what is missing of an upload's files; stores may do so at once. A part is a transaction, so that others
        get a turn.
        """
        if self._part(digest, 0) is not None:
            return
        with (folder / WEIGHTS_NAME).open("rb") as file:
            for number, content in enumerate(iter(partial(file.read, PART_BYTES), b""), 1):
                self._insert(digest, number, content)
        self._insert(digest, 0, (folder / CONFIG_NAME).read_bytes())

    def restore(self, digest: str, folder: Path) -> bool:
        """Write an upload's files into the empty folder; False if there is no whole copy."""
        config = self._part(digest, 0)
        if config is None:
            return False
        (folder / CONFIG_NAME).write_bytes(config)
        with (folder / WEIGHTS_NAME).open("wb") as file:
            number = 1
            while (content := self._part(digest, number)) is not None:
                file.write(content)
                number += 1
        return True

    def remove(self, digest: str) -> None:
        with self._database.write() as connection:
            connection.execute(delete(file_parts).where(*self._where(digest)))

    def _part(self, digest: str, number: int) -> bytes | None:
        query = select(file_parts.c.content).where(*self._where(digest), file_parts.c.number == number)
        with self._database.read() as connection:
            content = connection.scalar(query)
        return None if content is None else bytes(content)

    def _insert(self, digest: str, number: int, content: bytes) -> None:
        place = {"base_digest": self._database.base_digest, "file_id": digest, "number": number}
        present = select(file_parts.c.number).where(*self._where(digest), file_parts.c.number == number)
        with self._database.write() as connection:
            if connection.scalar(present) is None:
                connection.execute(insert(file_parts).values(**place, content=content))

    def _where(self, digest: str) -> tuple[ColumnElement[bool], ...]:
        return file_parts.c.base_digest == self._database.base_digest, file_parts.c.file_id == digest
