"""What a process has counted and the ledger has not acknowledged, in files that outlive the process.

In: charges, as they are added, and word of batches that are in the ledger. Out: the batches of processes on this
machine that died with some. Rule: a batch has one file, named by its writer and number, which nothing is added to once
the batch is sent; so whoever sends it for a dead writer sends it as the writer did, and the ledger takes it once.

A file is written to as a pipe would be, without waiting for the disk: it survives its process, and not its machine. A
process that lives holds a lock, which the system takes away when it dies.
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
    """One batch of a writer that has died."""

    writer_id: str
    number: int
    rows: Sequence[Row]


class _OfAnotherRelease(Exception):
    """A file's lines have more fields than are known here. Its words are the file's place."""


class UsageWal:
    """One per process. Raises OSError if the folder cannot be made or written to."""

    def __init__(self, folder: Path, writer_id: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._writer_id = writer_id
        self._files: dict[int, int] = {}  # descriptors by the number of the batch
        new = folder / f"{writer_id}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(_lock_path(folder, writer_id))  # whoever sees it finds it locked

    def add(self, number: int, key: LedgerKey, charge: UsageRecord) -> None:
        """Write down one charge of a batch that is not sent yet."""
        descriptor = self._files.get(number)
        if descriptor is None:
            path = _batch_path(self._folder, self._writer_id, number)
            descriptor = self._files[number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, json.dumps([*key, *charge]).encode() + b"\n")

    def recorded(self, number: int) -> None:
        """The ledger has the batch."""
        if (descriptor := self._files.pop(number, None)) is not None:
            os.close(descriptor)
            _batch_path(self._folder, self._writer_id, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Leave; what is not recorded is found by the others."""
        for descriptor in self._files.values():
            os.close(descriptor)
        if not self._files:
            _lock_path(self._folder, self._writer_id).unlink(missing_ok=True)
        self._files.clear()
        os.close(self._lock)

    def abandoned(self) -> Iterator[OrphanedBatch]:
        """Batches of writers that have died, each writer's in order; one is forgotten once the next is asked for."""
        for lock in sorted(self._folder.glob("*.lock")):
            writer_id = lock.stem
            if writer_id == self._writer_id:
                continue
            try:
                descriptor = os.open(lock, os.O_RDWR)
            except FileNotFoundError:  # somebody else was faster
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for number, path in sorted(_batches(self._folder, writer_id)):
                    yield OrphanedBatch(writer_id, number, _read(path))
                    path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
            except BlockingIOError:
                continue  # it lives
            except _OfAnotherRelease as error:  # whose processes find it here
                logger.warning("%s counts what this release does not know; it is kept", error)
            finally:
                os.close(descriptor)


def open_wal(folder: Path, writer_id: str) -> UsageWal | None:
    """A journal in that folder; None, and a line in the log, where files cannot be written."""
    try:
        return UsageWal(folder, writer_id)
    except OSError as error:
        logger.warning("usage that is not told yet is lost if this process is killed: %s", error)
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
    """The sums of a batch's lines, as its writer would have sent them. A last line that was cut off is not there.

    Raises _OfAnotherRelease.
    """
    rows: list[Row] = []
    num_fields = len(LedgerKey._fields)
    for line in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError, TypeError):
            values = json.loads(line)
            if len(values) > num_fields + len(UsageRecord._fields):
                raise _OfAnotherRelease(path)
            rows.append((LedgerKey(*values[:num_fields]), UsageRecord(*values[num_fields:])))
            continue
        logger.error("%s has a line that no writer of ours wrote; it is left out", path)
    return sum_usage(rows)
