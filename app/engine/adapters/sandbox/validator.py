"""Reads adapters in the sandbox and remembers refusals.

File contents are interpreted in a child process (`reader_process`), never here. A refusal is remembered by the hash of
the files, whatever the name, so bad contents are read only once. A timeout, a crash, a failing machine (disk, network,
memory) or files that cannot be hashed are not remembered; the store decides when to retry those.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from app.engine.adapters.adapter_tokenizer import SMALL_TEXT_FILES, TEXT_FILES
from app.engine.adapters.bounded_files import (
    DEFAULT_LIMITS,
    ReadLimits,
    adapter_read_errors,
    open_plain_file,
    plain_file_size,
)
from app.engine.adapters.combining.combination import Combination
from app.engine.adapters.combining.combine import check_cost
from app.engine.adapters.formats.peft import weights_file
from app.engine.adapters.formats.peft_config import CONFIG_NAME
from app.engine.adapters.formats.peft_file import WEIGHTS_NAME
from app.engine.adapters.sandbox.packing import PackedAdapter, unpack_adapter
from app.engine.adapters.sandbox.reader_process import ReaderLimits, ReaderProcess
from app.engine.adapters.sandbox.reader_worker import CombineTask, ReaderTask
from app.engine.errors import AdapterError, AdapterReadFailed, AdapterTooLarge
from app.engine.models.spec import ModelSpec

#: More time for a combination by SVD than for reading as many bytes.
MAX_COMBINE_S = 300.0


class _Refusal(NamedTuple):
    sizes: tuple[int, ...]
    error: AdapterError


class Validator:
    """Reads adapters safely. Thread-safe. supported_features: see `build_adapter`."""

    def __init__(
        self,
        limits: ReadLimits = DEFAULT_LIMITS,
        reader_limits: ReaderLimits | None = None,
        *,
        supported_features: frozenset[str] = frozenset(),
        max_refusals: int = 4096,
    ) -> None:
        self.limits = limits
        self.reader_limits = reader_limits or ReaderLimits()
        self.num_reads = 0
        self._supported_features = supported_features
        self._max_refusals = max_refusals
        self._refusals: OrderedDict[str, _Refusal] = OrderedDict()
        self._lock = threading.Lock()
        self._process = ReaderProcess()

    def read(self, path: Path, spec: ModelSpec) -> PackedAdapter:
        """The adapter at `path`, packed. Raises the AdapterError found, now or the first time."""
        with adapter_read_errors(path):
            if path.is_dir():
                weights_file(
                    path
                )  # incomplete folders hash alike, and the message names the folder: report it uncached
        files = adapter_files(path)
        sizes = tuple(_checked_size(file, self.limits) for file in files)
        self._raise_cached(path, spec, sizes)
        before = files_identity(path)
        size = sum(sizes)
        task = ReaderTask(
            path,
            spec,
            self.limits,
            self._supported_features,
            self.reader_limits.memory_bytes(size),
            self.reader_limits.seconds(size),
        )
        self.num_reads += 1
        try:
            return self._process.read(task)
        except AdapterReadFailed:
            raise
        except AdapterError as error:
            try:
                digest = files_digest(path, spec, self.limits)
            except AdapterError:  # for example a file without read permission
                raise error from None
            if before == files_identity(path):  # else the verdict is about other bytes than were hashed
                self._remember(digest, _Refusal(sizes, error))
            raise

    def combine(self, combination: Combination, parts: Sequence[PackedAdapter], spec: ModelSpec) -> PackedAdapter:
        """The parts' combination, made in a reader process. The parts are not changed. Raises CombinationError."""
        adapters = [unpack_adapter(part.header, part.arrays) for part in parts]
        limits = self.limits
        check_cost(combination, adapters, max_bytes=limits.max_weight_bytes, max_rank=limits.max_rank)
        arrays = [part.arrays[0] for part in parts]
        size = sum(array.nbytes for array in arrays)
        seconds = self.reader_limits.seconds(size) + (MAX_COMBINE_S if combination.method.name.endswith("svd") else 0)
        task = CombineTask(
            combination,
            spec,
            [part.header for part in parts],
            [array.nbytes for array in arrays],
            self.reader_limits.memory_bytes(size),
            seconds,
        )
        return self._process.read(task, arrays)

    def close(self) -> None:
        self._process.close()

    def _raise_cached(self, path: Path, spec: ModelSpec, sizes: tuple[int, ...]) -> None:
        """Raise a remembered refusal. Only files of the same sizes as refused ones are hashed, so a good adapter costs
        nothing.
        """
        with self._lock:
            is_suspect = any(refusal.sizes == sizes for refusal in self._refusals.values())
        if is_suspect:
            digest = files_digest(path, spec, self.limits)
            with self._lock:
                refusal = self._refusals.get(digest)
            if refusal is not None:
                raise type(refusal.error)(str(refusal.error))

    def _remember(self, digest: str, refusal: _Refusal) -> None:
        with self._lock:
            self._refusals[digest] = refusal
            while len(self._refusals) > self._max_refusals:
                self._refusals.popitem(last=False)


def adapter_files(path: Path) -> list[Path]:
    """The existing files of the adapter at `path`. Errors: see `reading`."""
    with adapter_read_errors(path):
        if not path.is_dir():
            return [path]
        return [path / name for name in (CONFIG_NAME, WEIGHTS_NAME, *TEXT_FILES) if os.path.lexists(path / name)]


def files_identity(path: Path) -> tuple[tuple[int, ...], ...]:
    """Changes when a file of the adapter is replaced or written to; reads no contents."""
    return tuple(_file_identity(file) for file in adapter_files(path))


def files_digest(path: Path, spec: ModelSpec, limits: ReadLimits = DEFAULT_LIMITS) -> str:
    """Hex SHA-256 of the adapter's files and of their base model."""
    digest = hashlib.sha256(b"polylora/files/v1\0" + hashlib.sha256(spec.digest.encode()).digest())
    for file in adapter_files(path):
        digest.update(file.name.encode(errors="surrogateescape") + b"\0")
        size = _checked_size(file, limits)
        digest.update(size.to_bytes(8, "little"))
        with adapter_read_errors(file), open_plain_file(file) as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _checked_size(file: Path, limits: ReadLimits) -> int:
    size = plain_file_size(file)
    bound = limits.max_weight_bytes
    if file.name == CONFIG_NAME:
        bound = limits.max_config_bytes
    elif file.name in SMALL_TEXT_FILES:
        bound = limits.max_header_bytes
    if size > bound:
        raise AdapterTooLarge(f"'{file.name}' has {size} bytes but at most {bound} are read")
    return size


def _file_identity(file: Path) -> tuple[int, ...]:
    try:
        status = os.lstat(file)
    except OSError:
        return ()  # deleted: counts as changed
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
