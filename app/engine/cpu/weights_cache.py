"""Packed base weights in a file that every engine on the machine maps: only the first one packs them.

A checkpoint's tensors take seconds per hundred million weights to unpack, choose a storage for, and pack. What they
became is written to the cache (POLYLORA_CACHE, default ~/.cache/polylora), and the next engine maps it: it starts
without reading the checkpoint's tensors, and all engines on the machine share one copy in memory, the page cache's.

The file's name is a digest of all that decides its contents: the checkpoint's own digest, the settings that the caller
names, and the source code that packs. A checksum is verified whenever a file is mapped; a file that does not match is
packed again. Each array lies in pages of its own, as aligned as any kernel wants it, behind a pickle of the structure.
The cache's owner alone can write it, like the compiled kernels beside it.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import pickle
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar, cast

from app.kernels.machine.disk_cache import default_cache_dir, source_digest

#: Packing less than this takes less than half a second.
MIN_BYTES = 64 << 20
#: Files that are kept for one checkpoint, those of other settings included: the last ones used.
MAX_FILES = 2
_PIECE_BYTES = 16 << 20
#: How the name of a file begins that is being written, and the longest time that takes.
_UNFINISHED, _MAX_WRITE_S = ".packing-", 3600
#: The file begins with the checksum of everything behind it: bytes of the structure, number of arrays, and so on.
_CHECKSUM, _HEADER = struct.Struct("<I"), struct.Struct("<4xQQ")

_LOGGER = logging.getLogger(__name__)

_Weights = TypeVar("_Weights")


def packed_weights(checkpoint_digest: str, settings: object, pack: Callable[[], _Weights]) -> _Weights:
    """What `pack` returns, a tree of named tuples, arrays and numbers, from the cache if it is there.

    checkpoint_digest: of the tensors that are packed; empty if it is not known, then nothing is cached. settings: all
    else that the result depends on; its repr counts. The arrays may be written to, which changes no file.
    """
    if not checkpoint_digest:
        return pack()
    key = hashlib.sha256(f"{checkpoint_digest} {_code_version()} {settings!r}".encode()).hexdigest()
    path = default_cache_dir() / "weights" / checkpoint_digest[:16] / key[:32]
    if path.exists():
        try:
            weights = _map(path)
        except (OSError, ValueError) as error:
            _LOGGER.warning("the packed weights in %s are packed again: %s", path, error)
        else:
            _LOGGER.info("packed weights mapped from %s", path)
            return cast(_Weights, weights)
    weights = pack()
    try:
        return cast(_Weights, _map(path)) if _write(path, weights) else weights
    except (OSError, ValueError) as error:
        _LOGGER.warning("the packed weights are not cached: %s", error)
        return weights


def _write(path: Path, weights: object) -> bool:
    """Write the file, unless it is small; returns whether it is there. Raises OSError if there is no room for it."""
    arrays: list[memoryview] = []

    def is_empty(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes > 0:
            arrays.append(raw)
        return raw.nbytes == 0

    structure = pickle.dumps(weights, protocol=5, buffer_callback=is_empty)
    sizes = struct.pack(f"<{len(arrays)}Q", *(array.nbytes for array in arrays))
    if sum(array.nbytes for array in arrays) < MIN_BYTES:
        return False
    parts = [memoryview(sizes), memoryview(structure), *arrays]
    starts = [*_starts(len(sizes), len(structure), [array.nbytes for array in arrays])]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
    try:
        with os.fdopen(handle, "w+b") as file:
            file.write(_HEADER.pack(len(structure), len(arrays)))
            for start, part in zip(starts, parts, strict=True):
                file.seek(start)
                file.write(part)
            file.flush()
            with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                checksum = _checksum(view)
            file.seek(0)
            file.write(_CHECKSUM.pack(checksum))
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    _remove_others(path)
    return True


def _map(path: Path) -> object:
    """The weights in a file. Raises ValueError if it is not whole, OSError if it cannot be read."""
    with path.open("rb") as file:
        os.utime(path)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # ValueError for an empty file
    view = memoryview(data)
    if len(view) < _HEADER.size:
        raise ValueError("it is too short")
    if _CHECKSUM.pack(_checksum(view)) != view[: _CHECKSUM.size]:
        raise ValueError("its checksum is wrong")
    structure_bytes, num_arrays = _HEADER.unpack_from(view)
    sizes = struct.unpack_from(f"<{num_arrays}Q", view, _HEADER.size)
    _, first, *starts = _starts(8 * num_arrays, structure_bytes, sizes)
    buffers = [view[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return pickle.loads(view[first : first + structure_bytes], buffers=buffers)


def _starts(sizes_bytes: int, structure_bytes: int, sizes: tuple[int, ...] | list[int]) -> Iterator[int]:
    """Where the sizes, the structure and each array begin: arrays at pages."""
    yield _HEADER.size
    yield _HEADER.size + sizes_bytes
    end = _HEADER.size + sizes_bytes + structure_bytes
    for size in sizes:
        start = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        yield start
        end = start + size


def _checksum(view: memoryview) -> int:
    """CRC-32 of the CRC-32s of the pieces behind itself; reads every page, on all processors."""
    places = range(_CHECKSUM.size, len(view), _PIECE_BYTES)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sums = pool.map(lambda start: zlib.crc32(view[start : start + _PIECE_BYTES]), places)
        return zlib.crc32(b"".join(struct.pack("<I", value) for value in sums))


def _remove_others(path: Path) -> None:
    """Leave the checkpoint's `MAX_FILES` last used files, `path` among them, and no file whose writer was killed."""
    files = sorted((file for file in path.parent.iterdir() if file != path), key=lambda file: -file.stat().st_mtime)
    unfinished = [file for file in files if file.name.startswith(_UNFINISHED)]
    others = [file for file in files if file not in unfinished]
    killed = [file for file in unfinished if file.stat().st_mtime < time.time() - _MAX_WRITE_S]
    for file in killed + others[MAX_FILES - 1 :]:
        file.unlink(missing_ok=True)  # engines that have mapped it keep it


@cache
def _code_version() -> str:
    """Version of the package that reads GGUF's types, and digest of the code that reads and packs tensors."""
    return f"{version('gguf')} {source_digest(Path(__file__).parents[2], ('kernels', 'engine'))}"
