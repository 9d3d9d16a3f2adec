"""A bounded reader for untrusted safetensors files, and a writer.

Tensors are views of one read of the file. Types, shapes and offsets in the header are checked against each other and
against the file's size before a tensor is formed, and the tensors must cover the data without gap or overlap. Format:
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.engine.adapters.bounded_files import ReadLimits, read_bounded
from app.engine.adapters.raw_adapter import DTYPE_BYTES, RawTensor
from app.engine.adapters.strict_json import parse_object, short
from app.engine.errors import AdapterFormatError, AdapterTooLarge

_MAX_DIMENSIONS = 4
_MAX_NAME_CHARS = 512


def read_safetensors(path: Path, limits: ReadLimits) -> dict[str, RawTensor]:
    """Every tensor of the file, sorted by name. AdapterFormatError, AdapterTooLarge."""
    contents = memoryview(read_bounded(path, limits.max_weight_bytes))
    what = f"'{path.name}'"
    if len(contents) < 8:
        raise AdapterFormatError(f"{what} has {len(contents)} bytes; a safetensors file starts with an 8-byte length")
    (header_size,) = struct.unpack("<Q", contents[:8])
    if header_size > limits.max_header_bytes:
        raise AdapterTooLarge(
            f"{what} is damaged or no safetensors file: it claims a header of {header_size} bytes, "
            f"and at most {limits.max_header_bytes} are read"
        )
    if header_size > len(contents) - 8:
        raise AdapterFormatError(
            f"{what} is cut off or damaged: it claims a header of {header_size} bytes in a file of {len(contents)}; "
            "copy it again"
        )
    header = parse_object(bytes(contents[8 : 8 + header_size]), f"{what} header")
    _check_metadata(header.pop("__metadata__", {}), what)
    if len(header) > limits.max_tensors:
        raise AdapterTooLarge(f"{what} holds {len(header)} tensors; at most {limits.max_tensors} are read")

    data = contents[8 + header_size :]
    tensors: dict[str, RawTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name in sorted(header):
        if len(name) > _MAX_NAME_CHARS:
            raise AdapterFormatError(f"{what}: tensor name {short(name)} is longer than {_MAX_NAME_CHARS} characters")
        dtype, shape, start, end = _check_entry(header[name], f"{what}: tensor {short(name)}", len(data))
        tensors[name] = RawTensor(dtype, shape, data[start:end])
        spans.append((start, end, name))
    _check_cover(spans, len(data), what)
    return tensors


def safetensors_metadata(path: Path, limits: ReadLimits) -> Mapping[str, str]:
    """The free metadata of a file that `read_safetensors` has read."""
    contents = read_bounded(path, limits.max_weight_bytes)
    (header_size,) = struct.unpack("<Q", contents[:8])
    found: Mapping[str, str] = parse_object(contents[8 : 8 + header_size], "header").get("__metadata__", {})
    return found


def write_safetensors(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Write unquantised tensors as they are, sorted by name, so that equal tensors make equal files."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in sorted(tensors.items()):
        end = position + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in sorted(tensors.items()):
            file.write(tensor.data)


def _check_entry(entry: Any, what: str, data_size: int) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise AdapterFormatError(f"{what}: entry must hold exactly dtype, shape and data_offsets, not {short(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise AdapterFormatError(f"{what}: dtype {short(dtype)} is not one of {', '.join(DTYPE_BYTES)}; cast it")
    if not _all_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise AdapterFormatError(f"{what}: shape {short(shape)} is not a list of up to {_MAX_DIMENSIONS} sizes")
    if not _all_sizes(offsets) or len(offsets) != 2:
        raise AdapterFormatError(f"{what}: data_offsets {short(offsets)} is not [start, end]")
    start, end = offsets
    if not start <= end <= data_size:
        raise AdapterFormatError(
            f"{what}: data_offsets [{start}, {end}] leave the file's {data_size} data bytes; the file is cut off or "
            "damaged, copy it again"
        )
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise AdapterFormatError(f"{what}: {end - start} bytes do not hold {dtype} {shape}")
    return dtype, tuple(shape), start, end


def _all_sizes(values: Any) -> bool:
    """Whether this is a list of integers from 0 to 2^63; JSON's `true` is not an integer."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_metadata(metadata: Any, what: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise AdapterFormatError(f"{what}: __metadata__ must map text to text")


def _check_cover(spans: list[tuple[int, int, str]], data_size: int, what: str) -> None:
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            fault = "overlaps another tensor" if start < position else f"leaves {start - position} bytes unused"
            raise AdapterFormatError(f"{what}: tensor {short(name)} at byte {start} {fault}")
        position = end
    if position != data_size:
        raise AdapterFormatError(f"{what}: {data_size - position} bytes after the last tensor belong to none")
