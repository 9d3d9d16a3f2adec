"""Arrow cards: exact, mapped, aligned, and refused when anything is off."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from app.engine.adapters.adapter_builder import build_adapter
from app.engine.adapters.bounded_files import ReadLimits
from app.engine.adapters.formats import arrow
from app.engine.adapters.formats.arrow import (
    CARD_SUFFIX,
    RESERVED_KEYS,
    ArrowCard,
    read_card,
    write_card,
)
from app.engine.adapters.formats.arrow_rows import CardRow, raw_adapter_from_rows
from app.engine.adapters.formats.convert import quantize_adapter, write_peft_folder
from app.engine.adapters.formats.peft import read_raw_peft
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.quantize import delta_error, dequantize, quantize
from app.engine.adapters.raw_adapter import RawAdapter, RawModule, RawTensor, RawTokenRows, content_digest
from app.engine.errors import AdapterError, AdapterFormatError, AdapterTooLarge
from app.engine.models.linear_modules import DENSE_TARGETS, target_shape
from app.engine.models.weight_names import expected_tensors
from tests import seeds
from tests.budgets import examples
from tests.engine.adapters.random_adapters import DTYPES, module_path, random_arrays, stored_tensor, tiny_spec
from tests.pairwise import pairwise

SPEC = tiny_spec()


def random_stored(rank: int = 3, dtype: str = "F32", targets: tuple[str, ...] = DENSE_TARGETS) -> RawAdapter:
    arrays = random_arrays(SPEC, rank, targets)
    modules = [
        RawModule(module_path(*key), stored_tensor(a, dtype), stored_tensor(b, dtype), 5.0, use_rslora=False)
        for key, (a, b) in arrays.items()
    ]
    return RawAdapter(tuple(sorted(modules, key=lambda module: module.path)))


def _write(folder: Path, stored: RawAdapter, **metadata: str) -> Path:
    path = folder / f"adapter{CARD_SUFFIX}"
    write_card(path, ArrowCard("sql", stored, metadata))
    return path


def _floats(dtype: str, shape: tuple[int, int]) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Any finite values of the type, subnormals and -0 included, from random bits."""
    bits = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}[dtype]

    def finite(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        values = raw.view(DTYPES[dtype])
        return np.where(np.isfinite(values.astype(np.float32)), values, np.zeros_like(values)).astype(DTYPES[dtype])

    return hnp.arrays(bits, shape).map(finite)


@st.composite
def stored_adapters(draw: st.DrawFn) -> RawAdapter:
    places = draw(st.sets(st.tuples(st.integers(0, 1), st.sampled_from(DENSE_TARGETS)), min_size=1, max_size=5))
    use_rslora = draw(st.booleans())
    modules = []
    for layer, target in places:
        rank = draw(st.integers(1, 5))
        d_in, d_out = target_shape(SPEC, layer, target)
        halves = []
        for shape in ((rank, d_in), (d_out, rank)):
            dtype = draw(st.sampled_from(sorted(DTYPES)))
            values = draw(_floats(dtype, shape))
            halves.append(RawTensor(dtype, shape, memoryview(values.tobytes())))
        alpha = draw(st.floats(-1e3, 1e3))
        modules.append(RawModule(module_path(layer, target), *halves, alpha, use_rslora))
    return RawAdapter(tuple(sorted(modules, key=lambda module: module.path)))


BIASED = replace(
    SPEC, layers=tuple(replace(layer, attention=replace(layer.attention, qkv_bias=True)) for layer in SPEC.layers)
)
OUTER = {"model.embed_tokens": (64, 24), "lm_head": (24, 64)}  # d_in, d_out: 64 tokens, hidden 24


@st.composite
def stored_beyond(draw: st.DrawFn) -> RawAdapter:
    """Everything that PEFT can save of an adapter, in any combination that it can be trained in."""
    plain = draw(stored_adapters())
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)

    def tensor(*shape: int) -> RawTensor:
        return stored_tensor(rng.normal(0, 1, shape), draw(st.sampled_from(sorted(DTYPES))))

    def some(names: Iterable[str]) -> list[str]:
        return draw(st.lists(st.sampled_from(sorted(names)), unique=True, max_size=3)) if names else []

    kind = draw(st.sampled_from(["plain", "magnitude", "bias"]))
    modules = list(plain.modules)
    if kind != "plain":
        modules = [replace(module, **{kind: tensor(module.b.shape[0])}) for module in modules]
    else:
        for path in some(OUTER):
            (d_in, d_out), rank = OUTER[path], draw(st.integers(1, 4))
            use_rslora = modules[0].use_rslora
            modules.append(RawModule(path, tensor(rank, d_in), tensor(d_out, rank), 2.5, use_rslora))
    adapted = {module.path for module in modules}
    shapes = expected_tensors(BIASED) | {"lm_head.weight": (64, 24)}
    weights = {name.removesuffix(".weight") for name in shapes if name.endswith(".weight")}
    saved = some(weights - adapted)
    names = {name for name in shapes if name.rpartition(".")[0] in saved}
    names |= {f"{path}.weight" for path in some(adapted & set(OUTER))}
    biases = {name for name in shapes if name.endswith(".bias")}
    trained = draw(st.sampled_from(["none", "lora_only", "all"]))
    if trained != "none":
        names |= {name for name in biases if trained == "all" or name.removesuffix(".bias") in adapted}
    rows = []
    for path in some(OUTER):
        ids = draw(st.lists(st.integers(0, 63), min_size=1, max_size=5, unique=True))
        rows.append(RawTokenRows(path, tuple(ids), tensor(len(ids), 24)))
    return RawAdapter(
        tuple(sorted(modules, key=lambda module: module.path)),
        "",
        tuple((name, tensor(*shapes[name])) for name in sorted(names)),
        tuple(sorted(rows, key=lambda item: item.path)),
    )


@settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(stored=st.one_of(stored_adapters(), stored_beyond()))
def test_peft_to_card_to_peft_changes_nothing(tmp_path_factory: pytest.TempPathFactory, stored: RawAdapter) -> None:
    folder = tmp_path_factory.mktemp("trip")
    write_peft_folder(folder / "peft", stored)
    from_peft = read_raw_peft(folder / "peft", None)
    assert from_peft == stored == read_raw_peft(folder / "peft", BIASED)
    card = read_card(_write(folder, from_peft))
    assert card.raw == stored
    assert content_digest(card.raw, "base") == content_digest(stored, "base")
    write_peft_folder(folder / "again", card.raw)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (folder / "again" / name).read_bytes() == (folder / "peft" / name).read_bytes()


def test_a_card_serves_the_same_adapter_as_its_folder(tmp_path: Path) -> None:
    stored = random_stored(4, "BF16")
    write_peft_folder(tmp_path / "peft", stored)
    path = _write(tmp_path, stored)
    from_card, from_folder = read_adapter(path, SPEC), read_adapter(tmp_path / "peft", SPEC)
    assert from_card.card == from_folder.card == read_adapter(tmp_path / "peft", SPEC).card
    for key, pair in from_folder.weights.items():
        for one, other in zip(pair, from_card.weights[key], strict=True):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(AdapterFormatError, match="neither"):
        read_adapter(tmp_path / "peft" / "adapter_config.json", SPEC)


@pairwise({"num_modules": [1, 2, 6, 7, 8, 14], "dtype": ["F32", "BF16"]}, strength=1)
def test_tensors_lie_in_the_mapped_file_at_multiples_of_64(tmp_path: Path, num_modules: int, dtype: str) -> None:
    stored = random_stored(3, dtype)
    path = _write(tmp_path, RawAdapter(stored.modules[:num_modules]))
    card = read_card(path)
    regions = _regions(path)
    assert len(card.raw.modules) == num_modules
    for module in card.raw.modules:
        for tensor in (module.a, module.b):
            view = np.frombuffer(tensor.data, np.uint8)
            address = view.ctypes.data
            assert address % 64 == 0
            assert any(start <= address and address + view.size <= end for start, end in regions)
            assert not view.flags.writeable


def test_whatever_a_card_holds_is_mapped(tmp_path: Path) -> None:
    """DoRA, biases, whole tensors, token rows and an embedding: views of the file, at multiples of 64."""
    rng = seeds.rng()

    def tensor(*shape: int) -> RawTensor:
        return stored_tensor(rng.normal(0, 1, shape), "BF16")

    modules = [
        replace(module, magnitude=tensor(module.b.shape[0]), bias=tensor(module.b.shape[0]))
        for module in random_stored().modules
    ]
    modules.append(RawModule("model.embed_tokens", tensor(3, 64), tensor(24, 3), 1.0, use_rslora=False))
    stored = RawAdapter(
        tuple(sorted(modules, key=lambda module: module.path)),
        "",
        (("lm_head.weight", tensor(64, 24)), ("model.norm.weight", tensor(24))),
        (RawTokenRows("lm_head", (7, 3, 5), tensor(3, 24)),),
    )
    path = _write(tmp_path, stored)
    read = read_card(path).raw
    assert read == stored
    regions = _regions(path)
    tensors = [part for m in read.modules for part in (m.a, m.b, m.magnitude, m.bias) if part is not None]
    tensors += [part for _, part in read.parameters] + [item.rows for item in read.token_rows]
    assert len(tensors) == 4 * 14 + 2 + 2 + 1
    for part in tensors:
        view = np.frombuffer(part.data, np.uint8)
        address = view.ctypes.data
        assert address % 64 == 0
        assert any(start <= address and address + view.size <= end for start, end in regions)
    assert pa.ipc.open_file(pa.memory_map(str(path))).schema.metadata[b"format_version"] == b"2"
    plain = _write(tmp_path, random_stored())
    assert pa.ipc.open_file(pa.memory_map(str(plain))).schema.metadata[b"format_version"] == b"1"


def _row(role: str, path: str = "m", shape: tuple[int, ...] = (2, 3), **changes: Any) -> CardRow:
    return replace(CardRow(path, role, stored_tensor(np.zeros(shape))), **changes)


IDS = RawTensor("I64", (2,), memoryview(np.array([5, 1], "<i8").tobytes()))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (_row("full"), "role 'full' is not known"),
        (_row("lora"), r"shape_b \[\] does not suit role lora"),
        (_row("lora", "l", b=stored_tensor(np.zeros((2, 3)))), "stored twice"),
        (_row("lora", b=IDS), "shape_b"),
        (_row("lora", a=IDS, b=stored_tensor(np.zeros((2, 3)))), "shape_a"),
        (_row("magnitude", shape=(4,)), "which has no lora row"),
        (_row("magnitude", "l"), r"shape_a \[2, 3\]"),
        (_row("bias", "l", (4,), b=IDS), "shape_b"),
        (_row("bias", "l", (4,), alpha=1.0), "has no alpha"),
        (_row("parameter", shape=(4,), use_rslora=True), "has no alpha"),
        (_row("parameter", a=IDS), "dtype_a I64"),
        (_row("parameter", a=RawTensor("I8", (4,), memoryview(bytes(4)), bytes(4))), "dtype_a I8"),
        (_row("token_rows"), "shape_b"),
        (_row("token_rows", b=stored_tensor(np.zeros(2))), "dtype_b F32"),
        (_row("token_rows", shape=(3, 3), b=IDS), "2 token ids do not name 3 rows"),
        (_row("token_rows", b=replace(IDS, data=memoryview(np.array([5, 5], "<i8").tobytes()))), "token ids"),
        (_row("token_rows", b=replace(IDS, data=memoryview(np.array([5, -1], "<i8").tobytes()))), "token ids"),
    ],
)
def test_rows_that_make_no_adapter_are_refused(row: CardRow, says: str) -> None:
    lora = _row("lora", "l", b=stored_tensor(np.zeros((3, 2))))
    assert len(raw_adapter_from_rows([lora], "").modules) == 1
    with pytest.raises(AdapterFormatError, match=says):
        raw_adapter_from_rows([lora, row], "")


def test_a_card_of_version_1_has_modules_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "FORMAT_VERSIONS", ("1", "1"))
    stored = replace(random_stored(), parameters=(("model.norm.weight", stored_tensor(np.ones(24))),))
    with pytest.raises(AdapterFormatError, match="version 1 has no role"):
        read_card(_write(tmp_path, stored))


def test_peft_cannot_say_what_a_card_can(tmp_path: Path) -> None:
    one, other, *_ = random_stored().modules
    for change in ({"use_rslora": True}, {"magnitude": stored_tensor(np.ones(other.b.shape[0]))}):
        mixed = RawAdapter((one, replace(other, **change)))
        assert read_card(_write(tmp_path, mixed)).raw == mixed
        with pytest.raises(AdapterFormatError, match=r"PEFT cannot mix.*as a card"):
            write_peft_folder(tmp_path / "peft", mixed)


def _regions(path: Path) -> list[tuple[int, ...]]:
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    return [tuple(int(end, 16) for end in fields[0].split("-")) for fields in maps]


def test_metadata_is_kept_and_cannot_pose_as_the_formats(tmp_path: Path) -> None:
    stored = random_stored()
    path = _write(tmp_path, stored, author="ada", version="3", description="answers in SQL, 简明 ✓")
    card = read_card(path)
    assert card.name == "sql"
    assert card.metadata == {"author": "ada", "version": "3", "description": "answers in SQL, 简明 ✓"}
    found = read_adapter(path, SPEC).card
    assert found.description == "answers in SQL, 简明 ✓"
    assert json.loads(found.metadata) == {"author": "ada", "version": "3"}
    assert read_adapter(_write(tmp_path, stored), SPEC).card.metadata == ""
    assert read_adapter(path, SPEC).card.digest == build_adapter(stored, SPEC).card.digest
    for key in RESERVED_KEYS:
        with pytest.raises(AdapterFormatError, match=key):
            _write(tmp_path, stored, **{key: "1"})
    schema = pa.ipc.open_file(pa.memory_map(str(path))).schema
    assert schema.metadata[b"rank"] == b"3"
    assert schema.metadata[b"alpha"] == b"[5.0]"
    assert json.loads(schema.metadata[b"target_modules"]) == sorted(DENSE_TARGETS)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    module = random_stored().modules[0]
    wrong = replace(module, alpha="not a number")  # type: ignore[arg-type]
    with pytest.raises((pa.ArrowException, TypeError)):
        _write(tmp_path, RawAdapter((wrong,)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["I8", "I4"])
def test_quantised_storage_states_its_error(tmp_path: Path, dtype: str) -> None:
    stored = random_stored(8)
    rounded, report = quantize_adapter(stored, dtype)
    path = tmp_path / f"small{CARD_SUFFIX}"
    write_card(path, ArrowCard("small", rounded, {}, report))
    card = read_card(path)
    assert card.quantization == report
    assert card.raw == rounded
    errors = []
    for before, after in zip(stored.modules, card.raw.modules, strict=True):
        exact = before.b.to_float32().astype("f8") @ before.a.to_float32().astype("f8")
        found = after.b.to_float32().astype("f8") @ after.a.to_float32().astype("f8")
        errors.append(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert report.max_error == pytest.approx(max(errors), rel=1e-3)
    assert report.mean_error == pytest.approx(np.mean(errors), rel=1e-3)
    low, high = {"I8": (1e-3, 0.02), "I4": (0.05, 0.25)}[dtype]
    assert low < report.mean_error < high
    size = sum(len(t.data) + len(t.scales) for m in card.raw.modules for t in (m.a, m.b))
    plain = sum(len(t.data) for m in stored.modules for t in (m.a, m.b))
    assert size / plain < {"I8": 0.28, "I4": 0.16}[dtype]
    write_peft_folder(tmp_path / "plain", card.raw)
    served, again = read_adapter(path, SPEC), read_adapter(tmp_path / "plain", SPEC)
    for key, pair in served.weights.items():
        np.testing.assert_array_equal(pair.b, again.weights[key].b)
    assert served.card.digest != build_adapter(stored, SPEC).card.digest


@settings(max_examples=examples(200), deadline=None)
@given(
    values=hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    dtype=st.sampled_from(["I8", "I4"]),
)
def test_rounding_is_within_half_a_step(values: np.ndarray[Any, Any], dtype: str) -> None:
    data, scales = quantize(values, dtype)
    found = dequantize(memoryview(data), memoryview(scales), dtype, values.size)
    steps = np.repeat(np.frombuffer(scales, "<f4"), 64)[: values.size].astype(np.float64)
    tiny = np.finfo(np.float32).tiny * 200
    assert (np.abs(found.astype("f8") - values) <= 0.5001 * steps + tiny).all()
    assert (found[values == 0] == 0).all()


def test_delta_error_has_its_edges() -> None:
    zeros, ones = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    assert delta_error(zeros, ones.T, zeros, ones.T) == 0
    assert delta_error(ones, ones.T, zeros, ones.T) == pytest.approx(1)
    assert math.isinf(delta_error(zeros, ones.T, ones, ones.T))


def _rewritten(edit: Callable[[pa.Table], pa.Table], **write_options: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        table = pa.ipc.open_file(pa.OSFile(str(path))).read_all()
        table = edit(table)
        options = pa.ipc.IpcWriteOptions(**write_options)
        path.unlink()
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)

    return damage


def _column(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        values = [change(value) for value in table.column(name).to_pylist()]
        return table.set_column(index, table.schema.field(name), pa.array(values, table.schema.field(name).type))

    return _rewritten(edit)


def _meta(**changes: str | None) -> Callable[[Path], None]:
    def edit(table: pa.Table) -> pa.Table:
        metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()} | changes
        return table.replace_schema_metadata({key: value for key, value in metadata.items() if value is not None})

    return _rewritten(edit)


def _flip_byte(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    view = np.frombuffer(read_card(path).raw.modules[0].a.data, np.uint8)
    contents[contents.index(view.tobytes()) + 5] ^= 1
    path.unlink()
    path.write_bytes(contents)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_flip_byte, "checksum"),
        (_column("alpha", lambda alpha: alpha + 1), "checksum"),
        (_column("alpha", lambda _: math.nan), "finite"),
        (_column("module", lambda name: name.replace("0", "7")), "checksum"),
        (_column("role", lambda _: "full"), "checksum"),
        (_column("dtype_a", lambda _: "F64"), "F64"),
        (_column("dtype_a", lambda _: "BF16"), "do not hold"),
        (_column("dtype_b", lambda _: None), "null"),
        (_column("shape_a", lambda shape: [*shape, 1]), "shape"),
        (_column("shape_a", lambda shape: [-shape[0], -shape[1]]), "shape"),
        (_column("shape_b", lambda shape: [shape[0] * 2, shape[1]]), "do not hold"),
        (_column("scales_a", lambda _: b"1234"), "scales"),
        (_column("weight_a", lambda weight: weight[:-64]), "do not hold"),
        (_column("weight_b", lambda weight: weight + b"\1"), "do not hold"),
        (_meta(author="someone else"), "checksum"),
        (_meta(name="other"), "checksum"),
        (_meta(checksum=None), "checksum"),
        (_meta(format_version="2"), "checksum"),
        (_meta(format_version="5"), "format version"),
        (_rewritten(lambda table: table.drop_columns(["alpha"])), "columns"),
        (_rewritten(lambda table: table.slice(0, 0)), "batches"),
        (_rewritten(lambda table: table, compression="zstd"), "compressed"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "readable"),
        (lambda path: path.write_bytes(b""), "readable"),
        (lambda path: path.write_bytes(b"ARROW1\0\0" + b"\xff" * 100), "readable"),
        (lambda path: path.unlink(), "cannot open"),
    ],
)
def test_a_damaged_card_is_refused(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    path = _write(tmp_path, random_stored(5), author="me")
    assert len(read_card(path).raw.modules) == 14
    damage(path)
    with pytest.raises(AdapterError, match=says):
        read_card(path)


def test_modules_are_sorted_and_unique() -> None:
    one, other, *_ = random_stored().modules
    for modules in ((one, one), (other, one)):
        with pytest.raises(AdapterFormatError, match="once"):
            RawAdapter(modules)


def test_a_card_obeys_the_limits(tmp_path: Path) -> None:
    path = _write(tmp_path, random_stored(5), notes="x" * 2000)
    for limits in (ReadLimits(max_weight_bytes=100), ReadLimits(max_config_bytes=1000)):
        with pytest.raises(AdapterTooLarge, match=r"at most|more than"):
            read_card(path, limits)
    with pytest.raises(AdapterFormatError, match="1 to 3"):
        read_card(path, ReadLimits(max_tensors=3))
    with pytest.raises(AdapterTooLarge, match="rank 5"):
        read_adapter(path, SPEC, ReadLimits(max_rank=4))


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.25, 3e38, 1e-40]], ml_dtypes.bfloat16)
    tensor = RawTensor("BF16", (1, 4), memoryview(values.tobytes()))
    np.testing.assert_array_equal(tensor.to_float32(), values.astype(np.float32))
    module = RawModule("m", tensor, tensor, 1.0, use_rslora=False)
    read = read_card(_write(tmp_path, RawAdapter((module,)))).raw.modules[0]
    assert (read.a.dtype, bytes(read.a.data)) == ("BF16", values.tobytes())


def test_a_card_may_be_read_by_whom_the_umask_says(tmp_path: Path) -> None:
    """A service often runs as another user than the one who converts."""
    before = os.umask(0o022)
    try:
        path = _write(tmp_path, random_stored())
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
