"""Opening an adapter's files, limits on their cost, and errors that tell a bad file from a failing machine.

Every reader opens files with `open_plain_file` and checks these limits before it allocates anything whose size the
file's author chose.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from app.engine.errors import AdapterError, AdapterFormatError, AdapterReadFailed, AdapterTooLarge

MIB = 1 << 20
#: Errors of a disk or network, or of a machine out of memory or descriptors: they may be transient.
TRANSIENT_ERRNOS = frozenset(
    {errno.EIO, errno.EINTR, errno.EBUSY, errno.ENFILE, errno.EMFILE, errno.ENOMEM, errno.ENOSPC}
    | {errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED}
    | {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
)
#: Opens a folder on the way to a file; with O_PATH it needs no permission to list the folder.
_FOLDER = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Bounds on one adapter. The defaults admit rank 512 on every module of a 70B model.

    `max_text_bytes`: of a chat template, and of everything that the adapter's prompts need and the base does not have,
    because each ingress holds it.
    """

    max_config_bytes: int = MIB
    max_header_bytes: int = 16 * MIB
    max_text_bytes: int = 256 << 10
    max_invocation_tokens: int = 64
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
def adapter_read_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` while an adapter's file is read into a `reading_error`."""
    try:
        yield
    except OSError as error:
        raise reading_error(path, error) from error


def open_plain_file(path: Path) -> BufferedReader:
    """Open a regular file for reading. No part of `path` may be a symbolic link or "..".

    Each part is opened beneath the one before it, so a link that is swapped in meanwhile is refused, too: whatever is
    opened lies where `path` says. (`openat2` with RESOLVE_NO_SYMLINKS does the same on Linux 5.6 and later.) Raises
    AdapterFormatError for a link, pipe, device or folder, otherwise as `reading_error`.
    """
    folder = -1
    try:
        with adapter_read_errors(path):
            folder = os.open(path.anchor or ".", _FOLDER)
            for part in path.parts[bool(path.anchor) : -1]:
                inner = _open_part(part, _FOLDER, folder)
                os.close(folder)
                folder = inner
            descriptor = _open_part(path.name, os.O_RDONLY | os.O_NONBLOCK, folder)
    except ValueError as error:  # text that no file system name encodes
        raise AdapterFormatError(f"cannot open {path.name!r}: {error}") from error
    finally:
        if folder >= 0:
            os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterFormatError(f"'{path.name}' is not a regular file; give the adapter's folder as saved by PEFT")
    return os.fdopen(descriptor, "rb")


def _open_part(name: str, flags: int, folder: int) -> int:
    """Open `name` in the open `folder`. AdapterFormatError if it is a link."""
    if name in ("", ".", ".."):
        raise AdapterFormatError(f"{name!r} is not the name of a file in an adapter's path")
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        # ELOOP, or ENOTDIR where a folder was expected
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(
            os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        ):
            raise link_error(name) from None
        raise


def link_error(name: str) -> AdapterFormatError:
    return AdapterFormatError(f"'{name}' is a symbolic link, and links are not followed; put the file itself there")


def plain_file_size(path: Path) -> int:
    """The size of a regular file in bytes. Raises as `open_plain_file`, but opens nothing."""
    try:
        with adapter_read_errors(path):
            status = path.lstat()
    except ValueError as error:
        raise AdapterFormatError(f"cannot open {path.name!r}: {error}") from error
    if stat.S_ISLNK(status.st_mode):
        raise link_error(path.name)
    if not stat.S_ISREG(status.st_mode):
        raise AdapterFormatError(f"'{path.name}' is not a regular file")
    return status.st_size


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The contents of a file of at most `max_bytes`, opened by `open_plain_file`.

    The size comes from the open file, so a file that grows after the check is still bounded, and a file that shrinks
    while it is read is an error instead of a fault in mapped memory. AdapterReadFailed: see `reading_error`.
    """
    with adapter_read_errors(path), open_plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise AdapterTooLarge(
                f"'{path.name}' has {size} bytes but at most {max_bytes} are read; "
                "raise the reader's limits or save a smaller adapter"
            )
        contents = file.read(size)
    if len(contents) != size:
        raise AdapterFormatError(f"'{path.name}' changed while it was read; save it again and retry")
    return contents
