"""Cards in ArrowEngine's format: an adapter's low-rank pairs in six columns, one rank and alpha for all modules.

A is [r, d_in] and B [d_out, r] as in PEFT, or both are transposed; the rank shows which.

    module             utf8        "model.layers.0.self_attn.q_proj"
    weight_a, weight_b binary      little-endian, row-major
    shape_a, shape_b   list<int>
    dtype              utf8        of both: float32, float16, float64, bfloat16

Metadata: lora_name, lora_rank, lora_alpha; target_modules, comma-separated suffixes of module names; free text. There
is no checksum: a damaged file may be read as another adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from app.engine.adapters.formats.arrow_rows import LORA, CardRow, card_rows
from app.engine.adapters.formats.tensor_names import PREFIX
from app.engine.adapters.raw_adapter import DTYPE_BYTES, RawAdapter, RawTensor, raw_size_bytes, transpose
from app.engine.adapters.strict_json import short
from app.engine.errors import AdapterFormatError

#: Metadata keys with a meaning; every other key is free.
RESERVED_KEYS = frozenset({"lora_name", "lora_rank", "lora_alpha", "target_modules"})
_DTYPES: Mapping[str, str] = MappingProxyType(
    {"float32": "F32", "float16": "F16", "float64": "F64", "bfloat16": "BF16"}
)
_SCHEMA = pa.schema(
    [
        ("module", pa.utf8()),
        ("weight_a", pa.binary()),
        ("weight_b", pa.binary()),
        ("shape_a", pa.list_(pa.int32())),
        ("shape_b", pa.list_(pa.int32())),
        ("dtype", pa.utf8()),
    ]
)


class ArrowEngineCard(NamedTuple):
    """Contents of such a card; `free` is its free metadata."""

    name: str
    rows: list[CardRow]
    free: Mapping[str, str]


def is_arrowengine_schema(schema: pa.Schema) -> bool:
    """Whether these are the columns above; 64-bit offsets and sizes are accepted too."""
    wide = {pa.binary(): pa.large_binary(), pa.list_(pa.int32()): pa.list_(pa.int64())}
    return schema.names == _SCHEMA.names and all(
        field.type in (own.type, wide.get(own.type)) for field, own in zip(schema, _SCHEMA, strict=True)
    )


def read_arrowengine_batch(
    batch: pa.RecordBatch, mapped: pa.Buffer, metadata: Mapping[str, str], what: str
) -> ArrowEngineCard:
    """The rows of a batch with `is_arrowengine_schema`, by name. Raises AdapterFormatError."""
    missing = RESERVED_KEYS - {"target_modules"} - set(metadata)
    if missing:
        raise AdapterFormatError(f"{what}: metadata lacks {', '.join(sorted(missing))}; this is not a card")
    try:
        rank, alpha = int(metadata["lora_rank"]), float(metadata["lora_alpha"])
    except ValueError:
        rank, alpha = 0, math.nan
    if rank < 1 or not math.isfinite(alpha):
        given = f"lora_rank {short(metadata['lora_rank'])}, lora_alpha {short(metadata['lora_alpha'])}"
        raise AdapterFormatError(f"{what}: {given}; a rank of at least 1 and a finite alpha are needed")
    for column, name in zip(batch.columns, _SCHEMA.names, strict=True):
        if column.null_count:
            raise AdapterFormatError(f"{what}: column {name} has a null where a value belongs")
    targets = tuple(metadata.get("target_modules", "").split(","))
    texts = [batch.column(name).to_pylist() for name in ("module", "dtype", "shape_a", "shape_b")]
    data = [views(batch.column(name), mapped, what) for name in ("weight_a", "weight_b")]
    rows = []
    for module, dtype, shape_a, shape_b, weight_a, weight_b in zip(*texts, *data, strict=True):
        where = f"{what}: module {short(module)}"
        if not module.endswith(targets):
            raise AdapterFormatError(f"{where}: target_modules {short(metadata['target_modules'])} leave it out")
        a = _tensor(dtype, shape_a, weight_a, f"{where}: weight_a")
        b = _tensor(dtype, shape_b, weight_b, f"{where}: weight_b")
        if (a.shape[0], b.shape[1]) != (rank, rank):
            if (a.shape[1], b.shape[0]) != (rank, rank):
                raise AdapterFormatError(f"{where}: shapes {list(a.shape)} and {list(b.shape)} have no rank {rank}")
            a, b = transpose(a), transpose(b)
        rows.append(CardRow(module.removeprefix(PREFIX), LORA, a, b, alpha))
    free = {key: text for key, text in metadata.items() if key not in RESERVED_KEYS}
    return ArrowEngineCard(metadata["lora_name"], sorted(rows, key=lambda row: row.path), free)


def arrowengine_batch(name: str, raw: RawAdapter, free: Mapping[str, str]) -> pa.RecordBatch:
    """The adapter as one batch with its metadata. AdapterFormatError for what the columns cannot represent."""
    rows = card_rows(raw)
    others = sorted({row.role for row in rows if row.role != LORA})
    if raw.text:
        others.append("a chat template")
    if raw.invocation_tokens:
        others.append("activated LoRA")
    if any(row.use_rslora for row in rows):
        others.append("rsLoRA")
    if len({(row.a.shape[0], row.alpha) for row in rows if row.role == LORA}) > 1:
        others.append("more than one rank or alpha")
    types = {tensor.dtype for row in rows if row.role == LORA for tensor in (row.a, row.b)}
    others += [f"{dtype} weights" for dtype in sorted(types - {*DTYPE_BYTES})]
    others += [f"modules whose halves differ in type ({row.path})" for row in rows if row.b.dtype != row.a.dtype][:1]
    if others:
        raise AdapterFormatError(f"a plain card cannot hold {', '.join(others)}; write an ordinary card")
    taken = sorted(RESERVED_KEYS & set(free))
    if taken:
        raise AdapterFormatError(f"metadata key '{taken[0]}' belongs to the card format; choose another")
    names = {ours: theirs for theirs, ours in _DTYPES.items()}
    columns = {
        "module": [row.path for row in rows],
        "weight_a": [bytes(row.a.data) for row in rows],
        "weight_b": [bytes(row.b.data) for row in rows],
        "shape_a": [list(row.a.shape) for row in rows],
        "shape_b": [list(row.b.shape) for row in rows],
        "dtype": [names[row.a.dtype] for row in rows],
    }
    metadata = {
        **free,
        "lora_name": name,
        "lora_rank": str(rows[0].a.shape[0]),
        "lora_alpha": repr(float(rows[0].alpha)),
        "target_modules": ",".join(sorted({row.path.rsplit(".", 1)[-1] for row in rows})),
    }
    arrays = [pa.array(columns[field.name], field.type) for field in _SCHEMA]
    return pa.record_batch(arrays, schema=_SCHEMA.with_metadata(metadata))


def views(column: Any, mapped: pa.Buffer, what: str) -> list[memoryview]:
    """Each cell's bytes, as views of the mapped file. A compressed file has no such bytes, and could be a decompression
    bomb.
    """
    _, offsets, data = column.buffers()
    if data is None or data.size == 0:
        return [memoryview(b"")] * len(column)
    if not mapped.address <= data.address <= mapped.address + mapped.size - data.size:
        raise AdapterFormatError(f"{what}: the file is compressed; a card is mapped as it is")
    kind = np.dtype("<i8" if column.type == pa.large_binary() else "<i4")
    ends = np.frombuffer(offsets, kind, len(column) + 1, kind.itemsize * column.offset).tolist()
    whole = memoryview(data).cast("B")
    return [whole[start:end] for start, end in pairwise(ends)]


def _tensor(dtype: str, shape: list[Any], weight: memoryview, where: str) -> RawTensor:
    if dtype not in _DTYPES:
        raise AdapterFormatError(f"{where}: dtype {short(dtype)} is not one of {list(_DTYPES)}")
    if len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise AdapterFormatError(f"{where}: shape {short(shape)} is not two sizes of at least 1")
    if len(weight) != raw_size_bytes(_DTYPES[dtype], (shape[0], shape[1])):
        raise AdapterFormatError(f"{where}: {len(weight)} bytes do not hold {dtype} {shape}")
    return RawTensor(_DTYPES[dtype], (shape[0], shape[1]), weight)
