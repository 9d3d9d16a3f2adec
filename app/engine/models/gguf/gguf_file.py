"""A GGUF file's header: metadata and tensor locations, over a memory map; tensors are dequantised one at a time.

Values in the file are untrusted: every length is checked against the file's size before anything is allocated. The
`gguf` package dequantises; its own header reader takes 3.2 s for the 98,000 strings of a 49k vocabulary, this one 0.05
s, and every process that tokenises reads them. `gguf_model` interprets the contents.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from app.engine.errors import CheckpointError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_BYTES_AT_A_TIME = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's location. `shape` is row-major, as in NumPy (GGUF stores it reversed)."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of one file. `data` is the whole file, mapped read-only."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: NDArray[np.uint8]

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, newly allocated."""
        tensor = self.tensors[name]
        raw = self.data[tensor.offset : tensor.offset + tensor.num_bytes]
        if tensor.kind == gguf.GGMLQuantizationType.F32:
            return raw.view("<f4").reshape(tensor.shape).astype(np.float32)
        if tensor.kind == gguf.GGMLQuantizationType.F16:
            return raw.view("<f2").reshape(tensor.shape).astype(np.float32)
        num_rows, row_bytes = gguf.quant_shape_to_byte_shape((-1, tensor.shape[-1]), tensor.kind)
        rows = raw.view(np.ndarray).reshape(num_rows, row_bytes)  # not a memmap, whose slices are slow
        try:
            values = gguf.dequantize(rows.reshape(-1, row_bytes * _rows_together(rows.shape)), tensor.kind)
        except NotImplementedError:
            raise CheckpointError(f"tensor {name!r} has GGUF type {tensor.kind.name}, which cannot be read") from None
        return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)


def _rows_together(shape: tuple[int, ...]) -> int:
    """Rows to present to `gguf` as one: it takes 16 at a time, however short, and each batch costs several calls."""
    together = 1
    while shape[0] % (2 * together) == 0 and 32 * together * shape[1] <= _BYTES_AT_A_TIME:
        together *= 2
    return together


def read_gguf(path: Path) -> GgufFile:
    """Read the header; CheckpointError unless the file is a complete little-endian GGUF of version 2 or 3."""
    try:
        data = np.memmap(path, mode="r", dtype=np.uint8)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a GGUF file: {error}") from error
    reader = _Reader(memoryview(data.data), path)
    if bytes(reader.take(4)) != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    version = reader.scalar("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) are read")
    num_tensors, num_entries = reader.scalar("<Q"), reader.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = reader.string()
        if key in metadata:
            raise CheckpointError(f"{path} has the metadata key {key!r} twice")
        metadata[key] = reader.value(reader.scalar("<I"))
    headers = [reader.tensor_header() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path} has general.alignment {alignment!r}; a positive integer is needed")
    start = -(-reader.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in headers:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(shape, dtype=object))
        if name in tensors:
            raise CheckpointError(f"{path} has tensor {name!r} twice")
        if not shape or 0 in shape or shape[-1] % block:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(shape)}; type {kind.name} comes in blocks of {block}, at least one"
            )
        num_bytes = count // block * block_bytes
        if start + offset + num_bytes > len(data):
            raise CheckpointError(f"{path} ends at {len(data)} bytes, inside tensor {name!r}; is the file complete?")
        tensors[name] = GgufTensor(shape, kind, start + offset, num_bytes)
    return GgufFile(path, metadata, tensors, data)


class _Reader:
    """A cursor over the header."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data, self.path, self.offset = data, path, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.offset:
            raise CheckpointError(f"{self.path} ends inside its header, at {len(self.data)} bytes; is it complete?")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        raw = bytes(self.take(self.scalar("<Q")))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} has a string that is not UTF-8: {raw[:40]!r}") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("<I"), self.scalar("<Q")
            if item_kind in _SCALARS:
                code = _SCALARS[item_kind].replace("?", "b")
                return np.frombuffer(self.take(count * struct.calcsize(code)), dtype=code).tolist()
            if count > len(self.data) - self.offset:
                raise CheckpointError(f"{self.path} claims an array of {count} items, more than the file holds")
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path} has a metadata value of unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def tensor_header(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self.string()
        num_dims = self.scalar("<I")
        if num_dims > 4:
            raise CheckpointError(f"{self.path} has tensor {name!r} with {num_dims} dimensions; at most 4 are allowed")
        dims = [self.scalar("<Q") for _ in range(num_dims)]
        kind = self.scalar("<I")
        try:
            known = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise CheckpointError(f"tensor {name!r} has GGUF type {kind}, which is not known here") from None
        return name, tuple(reversed(dims)), known, self.scalar("<Q")
