"""Arrow cards: one adapter as one `.lora.arrow` file, memory-mapped instead of read.

The file is an Arrow IPC file of `arrow_rows` with name and metadata. Reading gives the same adapter bit for bit: its
tensors are views of the mapped file, each at a multiple of 64 bytes. The reader accepts exactly the schema below and
checks a SHA-256 over every row and all metadata. A mapped file must not shrink while in use: serve cards from a store
that never rewrites them.

    module           utf8           "model.layers.0.self_attn.q_proj"
    role             utf8           "lora": weight_a [r, d_in], weight_b [d_out, r]; other roles: `arrow_rows`
    alpha            float64        scale = alpha / r, or alpha / sqrt(r) with use_rslora
    use_rslora       bool
    dtype_a, dtype_b utf8           F32, F16, BF16 (Arrow and NumPy lack it), I8 or I4 (quantised), I64 (ids)
    shape_a, shape_b list<int64>
    scales_a, _b     large_binary   float32 per group of 64 values, quantised tensors only
    weight_a, _b     large_binary   little-endian, row-major, then zeros up to the next multiple of 64

A file with the columns of `arrowengine_card` is read as such a card, without a checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.adapters.bounded_files import (
    DEFAULT_LIMITS,
    TRANSIENT_ERRNOS,
    ReadLimits,
    adapter_read_errors,
    open_plain_file,
    reading_error,
)
from app.engine.adapters.formats.arrow_rows import LORA, NO_TENSOR, TOKEN_IDS, CardRow, card_rows, raw_adapter_from_rows
from app.engine.adapters.formats.arrowengine_card import (
    arrowengine_batch,
    is_arrowengine_schema,
    read_arrowengine_batch,
    views,
)
from app.engine.adapters.quantize import Quantization, num_groups
from app.engine.adapters.raw_adapter import DTYPE_BYTES, QUANTIZED_BITS, RawAdapter, RawTensor, raw_size_bytes
from app.engine.adapters.strict_json import parse_object, short
from app.engine.errors import AdapterFormatError, AdapterTooLarge

CARD_SUFFIX = ".lora.arrow"
#: Version 1 has only the role "lora", 3 adds experts, 4 activated LoRA; a card gets the lowest version that suffices.
FORMAT_VERSIONS = ("1", "2", "3", "4")
ALIGNMENT = 64

#: Keys that the format itself writes; free metadata may not use them.
REQUIRED_KEYS = frozenset(
    {"format", "format_version", "checksum", "padding", "name", "rank", "alpha", "target_modules"}
)
INVOCATION_KEY = "alora_invocation_tokens"
RESERVED_KEYS = REQUIRED_KEYS | {"quantization", "text", INVOCATION_KEY}

_DTYPES = (*DTYPE_BYTES, *QUANTIZED_BITS, TOKEN_IDS)

_SCHEMA = pa.schema(
    [
        ("module", pa.utf8()),
        ("role", pa.utf8()),
        ("alpha", pa.float64()),
        ("use_rslora", pa.bool_()),
        ("dtype_a", pa.utf8()),
        ("dtype_b", pa.utf8()),
        ("shape_a", pa.list_(pa.int64())),
        ("shape_b", pa.list_(pa.int64())),
        ("scales_a", pa.large_binary()),
        ("scales_b", pa.large_binary()),
        ("weight_a", pa.large_binary()),
        ("weight_b", pa.large_binary()),
    ]
)


@dataclass(frozen=True, slots=True)
class ArrowCard:
    """Contents of a card file. `metadata` is free text by free keys (version, author, description, …).

    `quantization`: the rounding error, if the tensors are quantised.
    """

    name: str
    raw: RawAdapter
    metadata: Mapping[str, str]
    quantization: Quantization | None = None


def write_card(path: Path, card: ArrowCard) -> None:
    """Write `card` to `path`, completely or not at all. Raises AdapterFormatError for reserved metadata keys."""
    _check_name(path)
    for key in card.metadata:
        if key in RESERVED_KEYS:
            raise AdapterFormatError(f"metadata key '{key}' belongs to the card format; choose another")
    if not card.raw.modules:
        raise AdapterFormatError("the adapter changes no module; there is nothing to write")
    modules, rows = card.raw.modules, card_rows(card.raw)
    batch = _batch(rows)
    metadata = dict(card.metadata) | {
        "format": "polylora.lora",
        "format_version": _version(rows, is_activated=bool(card.raw.invocation_tokens)),
        "name": card.name,
        "rank": json.dumps(max(module.rank for module in modules)),
        "alpha": json.dumps(sorted({module.alpha for module in modules})),
        "target_modules": json.dumps(sorted({module.path.rsplit(".", 1)[-1] for module in modules})),
    }
    if card.raw.text:
        metadata["text"] = card.raw.text
    if card.raw.invocation_tokens:
        metadata[INVOCATION_KEY] = json.dumps(card.raw.invocation_tokens)
    if card.quantization is not None:
        metadata["quantization"] = json.dumps(card.quantization._asdict())
    metadata["checksum"] = _checksum(metadata, rows)
    with _atomic_replace(path) as temporary:
        # Arrow aligns buffers to 8 bytes. Padding text in the schema moves the first weight to a
        # multiple of 64; the rows' own padding aligns the others.
        for padding in range(0, 2 * ALIGNMENT, 8):
            _write_ipc(temporary, batch, metadata | {"padding": " " * padding})
            if _first_weight_offset(temporary) % ALIGNMENT == 0:
                break
        else:
            raise AssertionError("no padding aligns the weights")


def write_arrowengine_card(path: Path, card: ArrowCard) -> None:
    """Like `write_card`, with the columns of `arrowengine_card`. AdapterFormatError for what they cannot represent."""
    _check_name(path)
    batch = arrowengine_batch(card.name, card.raw, card.metadata)
    with _atomic_replace(path) as temporary:
        _write_ipc(temporary, batch, {})


def _check_name(path: Path) -> None:
    if not path.name.endswith(CARD_SUFFIX):
        raise AdapterFormatError(f"a card's file name ends in {CARD_SUFFIX}, not {short(path.name)}")


@contextmanager
def _atomic_replace(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` unless writing fails."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # an ordinary file, so the umask applies
    try:
        yield temporary
        with temporary.open("rb") as file_to_sync:
            os.fsync(file_to_sync.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_card(path: Path, limits: ReadLimits = DEFAULT_LIMITS) -> ArrowCard:
    """The card in `path`, its tensors memory-mapped. Raises an AdapterError."""
    what = f"'{path.name}'"
    with adapter_read_errors(path), open_plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limits.max_weight_bytes:
            raise AdapterTooLarge(f"{what} has {size} bytes but at most {limits.max_weight_bytes} are read")
        if not size:
            raise AdapterFormatError(f"{what} is empty, not a readable Arrow file")
        mapped = pa.py_buffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
    try:
        reader = pa.ipc.open_file(pa.BufferReader(mapped))
        schema = reader.schema
        plain = is_arrowengine_schema(schema)
        if not plain and not schema.remove_metadata().equals(_SCHEMA):
            raise AdapterFormatError(f"{what} does not have the columns of a card; write it with `polylora convert`")
        metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        if sum(len(key) + len(value) for key, value in metadata.items()) > limits.max_config_bytes:
            raise AdapterTooLarge(f"{what}: more than {limits.max_config_bytes} characters of metadata")
        if not plain:
            _check_metadata(metadata, what)
        if reader.num_record_batches != 1:
            raise AdapterFormatError(f"{what} has {reader.num_record_batches} record batches; a card has one")
        batch = reader.get_batch(0)
        if not 1 <= batch.num_rows <= limits.max_tensors:
            raise AdapterFormatError(f"{what} has {batch.num_rows} rows; a card has 1 to {limits.max_tensors}")
        batch.validate(full=True)
        if plain:
            name, rows, free = read_arrowengine_batch(batch, mapped, metadata, what)
            return ArrowCard(name, _raw_adapter(rows, free, what), MappingProxyType(dict(free)))
        rows = _rows(batch, mapped, what)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            raise reading_error(path, error) from error
        raise AdapterFormatError(f"{what} is not a readable Arrow file: {str(error)[:200]}") from error
    stated = metadata.pop("checksum")
    if stated != _checksum(metadata, rows):
        raise AdapterFormatError(f"{what} does not match its checksum; it is damaged, fetch or write it again")
    free = {key: value for key, value in metadata.items() if key not in RESERVED_KEYS}
    if metadata["format_version"] == "1" and any(row.role != LORA for row in rows):
        raise AdapterFormatError(f"{what}: format version 1 has no role but 'lora'")
    least = _version(rows, is_activated=INVOCATION_KEY in metadata)
    if metadata["format_version"] < least:
        raise AdapterFormatError(
            f"{what}: format version {metadata['format_version']} has no "
            f"{'experts' if least == '3' else 'activated LoRA'}"
        )
    raw = _raw_adapter(rows, free, what)
    try:
        if "text" in metadata:
            raw = replace(raw, text=AdapterTokenizer.from_json(metadata["text"]).to_json())
        if INVOCATION_KEY in metadata:
            raw = replace(raw, invocation_tokens=_token_ids(metadata[INVOCATION_KEY]))
    except AdapterFormatError as error:
        raise AdapterFormatError(f"{what}: {error}") from error
    quantization = _quantization(metadata["quantization"], what) if "quantization" in metadata else None
    return ArrowCard(metadata["name"], raw, MappingProxyType(free), quantization)


def _raw_adapter(rows: Sequence[CardRow], free: Mapping[str, str], what: str) -> RawAdapter:
    """The adapter in these rows, with its free metadata."""
    others = {key: value for key, value in sorted(free.items()) if key != "description"}
    try:
        raw = raw_adapter_from_rows(rows, free.get("description", ""))
    except AdapterFormatError as error:
        raise AdapterFormatError(f"{what}: {error}") from error
    return replace(raw, metadata=json.dumps(others, ensure_ascii=False) if others else "")


def _version(rows: Sequence[CardRow], *, is_activated: bool) -> str:
    """The lowest format version that can hold these rows."""
    if is_activated:
        return "4"
    if any(".experts." in row.path for row in rows):
        return "3"
    return FORMAT_VERSIONS[any(row.role != LORA for row in rows)]


def _token_ids(text: str) -> tuple[int, ...]:
    ids = parse_object(f'{{"ids":{text}}}'.encode(), INVOCATION_KEY)["ids"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise AdapterFormatError(f"{INVOCATION_KEY} is {short(text)}, not a list of token ids")
    return tuple(ids)


def _quantization(text: str, what: str) -> Quantization:
    fields = parse_object(text.encode(), f"{what} quantization")
    numbers = [fields.get(key) for key in ("max_error", "mean_error")]
    if set(fields) != set(Quantization._fields) or fields["dtype"] not in QUANTIZED_BITS:
        raise AdapterFormatError(f"{what}: quantization {short(text)} is not understood")
    if not all(type(number) in (int, float) for number in numbers):
        raise AdapterFormatError(f"{what}: quantization errors {short(numbers)} are not numbers")
    return Quantization(**fields)


def _batch(rows: Sequence[CardRow]) -> pa.RecordBatch:
    # The offsets of weight_b lie between the two weight buffers; padding the last a compensates for them.
    tail = -8 * (len(rows) + 1) % ALIGNMENT
    weights_a = [_padded_bytes(row.a) for row in rows]
    weights_a[-1] += bytes(tail)
    columns = {
        "module": [row.path for row in rows],
        "role": [row.role for row in rows],
        "alpha": [row.alpha for row in rows],
        "use_rslora": [row.use_rslora for row in rows],
        "dtype_a": [row.a.dtype for row in rows],
        "dtype_b": [row.b.dtype for row in rows],
        "shape_a": [list(row.a.shape) for row in rows],
        "shape_b": [list(row.b.shape) for row in rows],
        "scales_a": [bytes(row.a.scales) for row in rows],
        "scales_b": [bytes(row.b.scales) for row in rows],
        "weight_a": weights_a,
        "weight_b": [_padded_bytes(row.b) for row in rows],
    }
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in _SCHEMA], schema=_SCHEMA)


def _padded_bytes(tensor: RawTensor) -> bytes:
    return bytes(tensor.data) + bytes(-len(tensor.data) % ALIGNMENT)


def _write_ipc(path: Path, batch: pa.RecordBatch, metadata: Mapping[str, str]) -> None:
    """Write the batch with `metadata` added to its own."""
    own = {key.decode(): value.decode() for key, value in (batch.schema.metadata or {}).items()}
    batch = batch.replace_schema_metadata(dict(sorted((own | dict(metadata)).items())))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _first_weight_offset(path: Path) -> int:
    source = pa.memory_map(str(path))
    mapped = source.read_buffer()
    source.seek(0)
    weights = pa.ipc.open_file(source).get_batch(0).column("weight_a")
    offset: int = weights.buffers()[2].address - mapped.address
    return offset


def _check_metadata(metadata: Mapping[str, str], what: str) -> None:
    missing = REQUIRED_KEYS - set(metadata)
    if missing:
        raise AdapterFormatError(f"{what}: metadata lacks {', '.join(sorted(missing))}; this is not a card")
    if metadata["format_version"] not in FORMAT_VERSIONS:
        raise AdapterFormatError(
            f"{what}: format version {short(metadata['format_version'])}; this program reads "
            f"{' and '.join(FORMAT_VERSIONS)}"
        )


def _rows(batch: pa.RecordBatch, mapped: pa.Buffer, what: str) -> list[CardRow]:
    for column, field in zip(batch.columns, _SCHEMA, strict=True):
        if column.null_count:
            raise AdapterFormatError(f"{what}: column {field.name} has a null where a value belongs")
    values = [batch.column(name).to_pylist() for name in _SCHEMA.names[:8]]
    data_of = [views(batch.column(name), mapped, what) for name in _SCHEMA.names[8:]]
    rows = []
    for path, role, alpha, use_rslora, dtype_a, dtype_b, shape_a, shape_b, *data in zip(*values, *data_of, strict=True):
        where = f"{what}: module {short(path)}"
        if not math.isfinite(alpha):
            raise AdapterFormatError(f"{where}: alpha is {alpha}; it must be finite")
        scales_a, scales_b, weight_a, weight_b = data
        a = _tensor(dtype_a, shape_a, scales_a, weight_a, f"{where}: weight_a")
        b = _tensor(dtype_b, shape_b, scales_b, weight_b, f"{where}: weight_b")
        rows.append(CardRow(path, role, a, b, alpha, use_rslora))
    return rows


def _tensor(dtype: str, shape: list[Any], scales: memoryview, weight: memoryview, where: str) -> RawTensor:
    if not dtype and not shape and not weight and not scales:
        return NO_TENSOR
    if dtype not in _DTYPES:
        raise AdapterFormatError(f"{where}: dtype {short(dtype)} is not one of {list(_DTYPES)}")
    if len(shape) not in (1, 2) or not all(type(size) is int and 0 < size < 1 << 31 for size in shape):
        raise AdapterFormatError(f"{where}: shape {short(shape)} is not one or two sizes of at least 1")
    dimensions = tuple(shape)
    size = 8 * dimensions[0] if dtype == TOKEN_IDS else raw_size_bytes(dtype, dimensions)
    if not size <= len(weight) < size + 2 * ALIGNMENT or any(weight[size:]):
        raise AdapterFormatError(
            f"{where}: {len(weight)} bytes do not hold {dtype} {shape} and zeros to a multiple of 64"
        )
    expected_scales = 4 * num_groups(math.prod(shape)) if dtype in QUANTIZED_BITS else 0
    if len(scales) != expected_scales:
        raise AdapterFormatError(f"{where}: {len(scales)} bytes of scales; {dtype} {shape} has {expected_scales}")
    return RawTensor(dtype, dimensions, weight[:size], scales)


def _checksum(metadata: Mapping[str, str], rows: Sequence[CardRow]) -> str:
    """SHA-256 over the metadata (except checksum and padding) and every field of every row, each with its length."""
    digest = hashlib.sha256()

    def add(*fields: bytes | memoryview) -> None:
        for field in fields:
            digest.update(struct.pack("<Q", len(field)))
            digest.update(field)

    covered = {key: value for key, value in metadata.items() if key not in ("checksum", "padding")}
    add(b"polylora/card/v1", json.dumps(covered, sort_keys=True).encode(), struct.pack("<Q", len(rows)))
    for row in rows:
        add(row.path.encode(), row.role.encode(), struct.pack("<d?", row.alpha, row.use_rslora))
        for tensor in (row.a, row.b):
            add(tensor.dtype.encode(), struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape), tensor.data, tensor.scales)
    return digest.hexdigest()
