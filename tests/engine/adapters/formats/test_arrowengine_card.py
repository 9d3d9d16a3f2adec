"""Cards as ArrowEngine writes them: read as the adapter that they are, written so that it reads them, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from app.cli.main import main
from app.engine.adapters.formats.arrow import ArrowCard, read_card, write_arrowengine_card, write_card
from app.engine.adapters.formats.convert import quantize_adapter, write_peft_folder
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.adapters.raw_adapter import RawAdapter
from app.engine.errors import AdapterFormatError, AdapterMismatch
from tests.engine.adapters.formats.test_arrow import SPEC, random_stored
from tests.engine.adapters.random_adapters import module_path, random_arrays

Arrays = Mapping[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
TARGETS = ("q_proj", "down_proj")
TOLD = {"lora_name": "sql", "lora_rank": "3", "lora_alpha": "6.0", "target_modules": ",".join(TARGETS)}


def arrays_of(dtype: Any = np.float32) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    made = random_arrays(SPEC, 3, TARGETS)
    return {module_path(*key): (a.astype(dtype), b.astype(dtype)) for key, (a, b) in made.items()}


def written(path: Path, arrays: Arrays, told: Mapping[str, str] = TOLD, **columns: Any) -> Path:
    """As ArrowEngine's `LoRAFormat.save` does, field by field; `columns` replace some."""
    values: dict[str, Any] = {
        "module": [*arrays],
        "weight_a": [a.tobytes() for a, _ in arrays.values()],
        "weight_b": [b.tobytes() for _, b in arrays.values()],
        "shape_a": [a.shape for a, _ in arrays.values()],
        "shape_b": [b.shape for _, b in arrays.values()],
        "dtype": [str(a.dtype) for a, _ in arrays.values()],
    } | columns
    kinds = [pa.string(), pa.binary(), pa.binary(), pa.list_(pa.int32()), pa.list_(pa.int32()), pa.string()]
    schema = pa.schema([*zip(values, kinds, strict=True)], metadata=dict(told))
    batch = pa.RecordBatch.from_arrays([pa.array(values[f.name], f.type) for f in schema], schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write(batch)
    return path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("lies", ["as in PEFT", "the other way round"])
def test_one_that_the_other_engine_wrote_is_served(tmp_path: Path, dtype: Any, lies: str) -> None:
    arrays = arrays_of(dtype)
    turned = arrays if lies == "as in PEFT" else {path: (a.T, b.T) for path, (a, b) in arrays.items()}
    told = TOLD | {"version": "2", "author": "ada", "description": "writes SQL"}
    adapter = read_adapter(written(tmp_path / "it.lora.arrow", turned, told), SPEC)
    assert len(adapter.weights) == len(arrays) == len(TARGETS) * len(SPEC.layers)
    for key, (a, b) in adapter.weights.items():
        theirs_a, theirs_b = (half.astype(np.float32) for half in arrays[module_path(key.layer, key.target)])
        np.testing.assert_array_equal(a.astype(np.float32), theirs_a)
        np.testing.assert_array_equal(b.astype(np.float32), 2 * theirs_b.T)  # alpha / rank
    assert adapter.card.description == "writes SQL"
    assert adapter.card.metadata == '{"author": "ada", "version": "2"}'
    assert read_card(tmp_path / "it.lora.arrow").name == "sql"


def test_what_is_written_is_what_the_other_engine_reads_and_reads_back_as_it_was(tmp_path: Path) -> None:
    stored, path = random_stored(), tmp_path / "it.lora.arrow"
    write_arrowengine_card(path, ArrowCard("sql", stored, {"author": "ada"}))
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    assert table.schema.names == ["module", "weight_a", "weight_b", "shape_a", "shape_b", "dtype"]
    told = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert (told["lora_name"], int(told["lora_rank"]), float(told["lora_alpha"])) == ("sql", 3, 5.0)
    modules = {module.path: module for module in stored.modules}
    assert all(path.endswith(tuple(told["target_modules"].split(","))) for path in modules)
    for row in table.to_pylist():
        for half, tensor in (("a", modules[row["module"]].a), ("b", modules[row["module"]].b)):
            values = np.frombuffer(row[f"weight_{half}"], np.dtype(row["dtype"])).reshape(row[f"shape_{half}"])
            np.testing.assert_array_equal(values, tensor.to_float32())
    card = read_card(path)
    assert replace(card.raw, metadata="") == stored
    assert (card.name, dict(card.metadata)) == ("sql", {"author": "ada"})


def test_a_name_with_pefts_prefix_is_the_bases(tmp_path: Path) -> None:
    arrays = arrays_of()
    plain = written(tmp_path / "it.lora.arrow", arrays)
    prefixed = written(tmp_path / "its.lora.arrow", {f"base_model.model.{path}": both for path, both in arrays.items()})
    assert read_adapter(plain, SPEC).card.digest == read_adapter(prefixed, SPEC).card.digest


def test_the_command_goes_there_and_back(tmp_path: Path) -> None:
    write_peft_folder(tmp_path / "peft", random_stored())
    card, again = tmp_path / "it.lora.arrow", tmp_path / "again"
    assert main(["convert", str(tmp_path / "peft"), str(card), "--plain", "--name", "sql"]) == 0
    assert main(["convert", str(card), str(again)]) == 0
    assert read_raw_adapter(again, SPEC) == read_raw_adapter(tmp_path / "peft", SPEC)


@pytest.mark.parametrize(
    ("told", "columns", "said"),
    [
        ({"lora_rank": "4"}, {}, r"shapes \[3, .*\] and .* have no rank 4"),
        ({"lora_rank": "0"}, {}, "lora_rank '0', lora_alpha '6.0'; a rank of at least 1"),
        ({"lora_rank": "three"}, {}, "lora_rank 'three'"),
        ({"lora_alpha": "nan"}, {}, "finite alpha"),
        ({"target_modules": "q_proj,up_proj"}, {}, r"down_proj'.*target_modules 'q_proj,up_proj' leave it out"),
        ({}, {"dtype": ["int8"] * 4}, "dtype 'int8' is not one of"),
        ({}, {"dtype": ["float16"] * 4}, "bytes do not hold float16"),
        ({}, {"dtype": [None] * 4}, "column dtype has a null"),
        ({}, {"shape_a": [(3,)] * 4}, "is not two sizes"),
        ({}, {"shape_a": [(-3, -8)] * 4}, "is not two sizes"),
        ({}, {"module": ["model.layers.0.mlp.down_proj"] * 4}, "is stored twice"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, told: dict[str, str], columns: dict[str, Any], said: str
) -> None:
    path = written(tmp_path / "it.lora.arrow", arrays_of(), TOLD | told, **columns)
    with pytest.raises(AdapterFormatError, match=said):
        read_card(path)


def test_a_name_or_a_rank_that_is_not_there_is_missed(tmp_path: Path) -> None:
    told = {key: text for key, text in TOLD.items() if key in ("lora_name", "target_modules")}
    with pytest.raises(AdapterFormatError, match="metadata lacks lora_alpha, lora_rank"):
        read_card(written(tmp_path / "it.lora.arrow", arrays_of(), told))


def test_modules_of_another_model_are_refused(tmp_path: Path) -> None:
    other = {path.replace("self_attn", "attention"): both for path, both in arrays_of().items()}
    with pytest.raises(AdapterMismatch, match=r"attention\.q_proj"):
        read_adapter(written(tmp_path / "it.lora.arrow", other), SPEC)


def _changed(stored: RawAdapter, **changes: Any) -> RawAdapter:
    return RawAdapter((replace(stored.modules[0], **changes), *stored.modules[1:]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stored: _changed(stored, alpha=7.0), "more than one rank or alpha"),
        (lambda stored: _changed(stored, use_rslora=True), "rsLoRA"),
        (lambda stored: _changed(stored, magnitude=stored.modules[0].a), "magnitude"),
        (lambda stored: replace(stored, invocation_tokens=(5,)), "activated LoRA"),
        (lambda stored: quantize_adapter(stored, "I8")[0], "I8 weights"),
        (lambda stored: _changed(stored, b=random_stored(3, "F16").modules[0].b), "halves differ in type"),
    ],
)
def test_what_the_columns_have_no_place_for_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    path, stored = tmp_path / "it.lora.arrow", random_stored()
    with pytest.raises(AdapterFormatError, match=f"a plain card cannot hold .*{said}"):
        write_arrowengine_card(path, ArrowCard("sql", change(stored), {}))
    assert not [*tmp_path.iterdir()]


def test_metadata_of_the_formats_own_is_refused_and_what_was_there_stays(tmp_path: Path) -> None:
    path, stored = tmp_path / "it.lora.arrow", random_stored()
    write_card(path, ArrowCard("sql", stored, {}))
    with pytest.raises(AdapterFormatError, match="'lora_rank' belongs to the card format"):
        write_arrowengine_card(path, ArrowCard("sql", stored, {"lora_rank": "9"}))
    assert read_card(path).raw == stored
