"""Write-ahead log of usage: files that keep recorded usage until the ledger has acknowledged it, also if a process
dies.

Each batch is a file named by its writer and number. Nothing is appended once the batch is sent, so a process that sends
it for a dead writer sends the same rows, and the ledger takes them once. Writes are not synced: they survive the
process, not the machine. A living process holds a lock, which the system releases when it dies.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from app.deployments.tenancy.usage.flusher import LedgerKey, Row, UsageRecord, sum_usage

logger = logging.getLogger(__name__)


class OrphanedBatch(NamedTuple):
    """One batch of a writer that died."""

    writer_id: str
    number: int
    rows: Sequence[Row]


class _NewerFormat(Exception):
    """A file's lines have more fields than this version knows. The message is the file's path."""


class UsageWal:
    """One per process. Raises OSError if the folder cannot be made or written to."""

    def __init__(self, folder: Path, writer_id: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._writer_id = writer_id
        self._files: dict[int, int] = {}  # file descriptors by batch number
        new = folder / f"{writer_id}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(_lock_path(folder, writer_id))  # locked before others can see it

    def add(self, number: int, key: LedgerKey, usage: UsageRecord) -> None:
        """Append one record to a batch that is not sent yet."""
        descriptor = self._files.get(number)
        if descriptor is None:
            path = _batch_path(self._folder, self._writer_id, number)
            descriptor = self._files[number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, json.dumps([*key, *usage]).encode() + b"\n")

    def acknowledge(self, number: int) -> None:
        """Delete a batch that the ledger has."""
        if (descriptor := self._files.pop(number, None)) is not None:
            os.close(descriptor)
            _batch_path(self._folder, self._writer_id, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock; other processes adopt unacknowledged batches."""
        for descriptor in self._files.values():
            os.close(descriptor)
        if not self._files:
            _lock_path(self._folder, self._writer_id).unlink(missing_ok=True)
        self._files.clear()
        os.close(self._lock)

    def orphans(self) -> Iterator[OrphanedBatch]:
        """Batches of dead writers, each writer's in order; a batch is deleted when the next one is requested."""
        for lock in sorted(self._folder.glob("*.lock")):
            writer_id = lock.stem
            if writer_id == self._writer_id:
                continue
            try:
                descriptor = os.open(lock, os.O_RDWR)
            except FileNotFoundError:  # another process was faster
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for number, path in sorted(_batches(self._folder, writer_id)):
                    yield OrphanedBatch(writer_id, number, _read(path))
                    path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
            except BlockingIOError:
                continue  # the writer lives
            except _NewerFormat as error:  # left for a process of that version
                logger.warning("%s has fields that this version does not know; keeping the file", error)
            finally:
                os.close(descriptor)


def open_wal(folder: Path, writer_id: str) -> UsageWal | None:
    """The WAL in that folder; None, with a log line, where files cannot be written."""
    try:
        return UsageWal(folder, writer_id)
    except OSError as error:
        logger.warning("no usage log; usage not yet flushed is lost if this process is killed: %s", error)
        return None


def _lock_path(folder: Path, writer_id: str) -> Path:
    return folder / f"{writer_id}.lock"


def _batch_path(folder: Path, writer_id: str, number: int) -> Path:
    return folder / f"{writer_id}.{number}.batch"


def _batches(folder: Path, writer_id: str) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("*.batch"):
        name, _, number = path.stem.rpartition(".")
        if name == writer_id and number.isdigit():
            yield int(number), path


def _read(path: Path) -> Sequence[Row]:
    """The batch's rows, summed as its writer would have sent them; a truncated last line is ignored. Raises
    _NewerFormat.
    """
    rows: list[Row] = []
    num_fields = len(LedgerKey._fields)
    for line in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError, TypeError):
            values = json.loads(line)
            if len(values) > num_fields + len(UsageRecord._fields):
                raise _NewerFormat(path)
            rows.append((LedgerKey(*values[:num_fields]), UsageRecord(*values[num_fields:])))
            continue
        logger.error("%s has an invalid line; ignoring it", path)
    return sum_usage(rows)
