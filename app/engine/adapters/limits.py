"""Limits on what an adapter's files may cost to read, and errors that tell a bad file from a failing machine.

Every reader checks these limits before it allocates anything whose size the file's author chose.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.engine.errors import AdapterError, AdapterFormatError, AdapterReadFailed, AdapterTooLarge

MIB = 1 << 20
#: Errors of a disk or network, or of a machine out of memory or descriptors: they may be transient.
TRANSIENT_ERRNOS = frozenset(
    {errno.EIO, errno.EINTR, errno.EBUSY, errno.ENFILE, errno.EMFILE, errno.ENOMEM, errno.ENOSPC}
    | {errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED}
    | {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Bounds on one adapter. The defaults admit rank 512 on every module of a 70B model."""

    max_config_bytes: int = MIB
    max_header_bytes: int = 16 * MIB
    max_weight_bytes: int = 8192 * MIB
    max_tensors: int = 100_000
    max_rank: int = 4096


DEFAULT_LIMITS = ReadLimits()


def reading_error(path: Path, error: OSError) -> AdapterError:
    """`AdapterFormatError` if the file is at fault, `AdapterReadFailed` if the machine is."""
    if error.errno in TRANSIENT_ERRNOS:
        return AdapterReadFailed(f"cannot read '{path.name}' now: {error.strerror}; try again later")
    return AdapterFormatError(f"cannot open '{path.name}': {error.strerror}")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `reading_error`."""
    try:
        yield
    except OSError as error:
        raise reading_error(path, error) from error


def regular_file_size(path: Path) -> int:
    """The size of a regular file; AdapterFormatError for anything else, AdapterReadFailed as in `reading_error`."""
    try:
        with reading(path):
            status = path.stat()
    except ValueError as error:
        raise AdapterFormatError(f"cannot open {path.name!r}: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise AdapterFormatError(f"'{path.name}' is not a regular file")
    return status.st_size


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The contents of a regular file of at most `max_bytes`; a pipe, device or folder is refused.

    The size comes from the open file, so a file that grows after the check is still bounded, and a file that shrinks
    while it is read is an error instead of a fault in mapped memory. AdapterReadFailed: see `reading_error`.
    """
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise AdapterFormatError(f"'{path.name}' is not a regular file; give the adapter's folder as saved by PEFT")
    with reading(path), os.fdopen(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise AdapterTooLarge(
                f"'{path.name}' has {status.st_size} bytes but at most {max_bytes} are read; "
                "raise the reader's limits or save a smaller adapter"
            )
        contents = file.read(status.st_size)
    if len(contents) != status.st_size:
        raise AdapterFormatError(f"'{path.name}' changed while it was read; save it again and retry")
    return contents
