"""How much an adapter may ask of its reader.

In: sizes found in a file's header. Out: `AdapterTooLarge` or `AdapterFormatError` before memory is
spent. Every reader checks these before it allocates anything that the file's author chose.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from app.engine.errors import AdapterFormatError, AdapterTooLarge

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Bounds on one adapter. The defaults admit rank 512 on every module of a 70B model."""

    max_config_bytes: int = MIB
    max_header_bytes: int = 16 * MIB
    max_weight_bytes: int = 8192 * MIB
    max_tensors: int = 100_000
    max_rank: int = 4096


DEFAULT_LIMITS = ReadLimits()


def regular_file_size(path: Path) -> int:
    """The size of a regular file; anything else is an `AdapterFormatError`."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise AdapterFormatError(f"cannot open {path.name!r}: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise AdapterFormatError(f"'{path.name}' is not a regular file")
    return status.st_size


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The whole of a regular file of at most `max_bytes`; a pipe, device or folder is refused.

    The size is taken from the open file, so a file that grows after the check is still bounded, and
    one that is cut while it is read is an error instead of a fault in mapped memory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AdapterFormatError(f"cannot open '{path.name}': {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise AdapterFormatError(f"'{path.name}' is not a regular file; give the adapter's folder as saved by PEFT")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise AdapterTooLarge(
                f"'{path.name}' has {status.st_size} bytes but at most {max_bytes} are read; "
                "raise the reader's limits or save a smaller adapter"
            )
        contents = file.read(status.st_size)
    if len(contents) != status.st_size:
        raise AdapterFormatError(f"'{path.name}' changed while it was read; save it again and retry")
    return contents
