"""An adapter of another base is told so, with both models' names and sizes, before anything else is said of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.adapters.sandbox.validator import Validator
from app.engine.errors import AdapterFormatError, AdapterMismatch
from app.engine.models.spec import ModelSpec
from tests.engine.adapters.random_adapters import PATHS, peft_config, peft_tensors, random_arrays, tiny_spec, write_peft

SPEC = tiny_spec(3)


def written(folder: Path, spec: ModelSpec, **changes: object) -> Path:
    arrays = random_arrays(spec, 4)
    write_peft(folder, peft_config(4, **changes), peft_tensors(arrays))
    return folder


@pytest.mark.parametrize(
    ("trained_for", "sizes"),
    [
        (replace(SPEC, hidden_size=36), "width 36, 3 layers"),
        (tiny_spec(5), "width 24, 5 layers"),
        (tiny_spec(2), "width 24, 2 layers"),
    ],
)
def test_both_bases_are_named_with_their_sizes(tmp_path: Path, trained_for: ModelSpec, sizes: str) -> None:
    folder = written(tmp_path / "a", trained_for, base_model_name_or_path="acme/other-0.5B")
    says = f"trained on 'acme/other-0.5B' ({sizes}), and this base is 'tiny' (width 24, 3 layers); load it where"
    with pytest.raises(AdapterMismatch, match=re.escape(says)):
        read_adapter(folder, SPEC)


def test_a_file_that_may_lack_layers_says_which(tmp_path: Path) -> None:
    """Of the same width, it may be this base's, too, and cut short: whoever wrote it knows."""
    with pytest.raises(AdapterMismatch, match=r"save it again if .* its file has nothing for layers 2 to 2"):
        read_adapter(written(tmp_path / "a", tiny_spec(2)), SPEC)
    for other in (tiny_spec(5), replace(tiny_spec(2), hidden_size=36)):
        with pytest.raises(AdapterMismatch, match=r"is served$"):
            read_adapter(written(tmp_path / f"{len(other.layers)}", other), SPEC)


def test_a_base_without_a_name_is_another_model(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", tiny_spec(5), base_model_name_or_path=None)
    with pytest.raises(AdapterMismatch, match="trained on another model"):
        read_adapter(folder, SPEC)


def test_an_adapter_of_some_layers_is_of_this_base(tmp_path: Path) -> None:
    read_adapter(written(tmp_path / "a", tiny_spec(2), layers_to_transform=[0, 1]), SPEC)
    paths = [f"model.layers.{layer}.{path}" for layer in (0, 1) for path in PATHS.values()]
    read_adapter(written(tmp_path / "c", tiny_spec(2), target_modules=paths), SPEC)
    read_adapter(written(tmp_path / "b", tiny_spec(2), target_modules=r".*layers\.[01]\..*_proj"), SPEC)


def test_a_folder_above_the_checkpoints_says_which_was_meant(tmp_path: Path) -> None:
    for step in (9, 10):
        written(tmp_path / "ckpt" / f"checkpoint-{step}", SPEC)
    (tmp_path / "ckpt" / "checkpoint-best").mkdir()
    with pytest.raises(AdapterFormatError, match=r"'ckpt' has no .*; did you mean 'ckpt/checkpoint-10'"):
        read_adapter(tmp_path / "ckpt", SPEC)


def test_a_file_of_an_adapter_says_to_name_its_folder(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", SPEC)
    with pytest.raises(AdapterFormatError, match="name the folder that it lies in"):
        read_raw_adapter(folder / "adapter_model.safetensors", SPEC)


def test_what_one_folder_lacks_is_not_told_of_another(tmp_path: Path) -> None:
    """Folders that lack the same file are alike; a refusal that is remembered would name the first."""
    validator = Validator()
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            with pytest.raises(AdapterFormatError, match=f"'{name}' has no adapter_config.json"):
                validator.read(tmp_path / name, SPEC)
        (tmp_path / "second" / "adapter_config.json").write_text("{}")
        (tmp_path / "second" / "adapter_model.bin").write_text("")
        with pytest.raises(AdapterFormatError, match=r"'second' holds .*bin, a pickle"):
            validator.read(tmp_path / "second", SPEC)
        assert validator.num_reads == 0, "nothing has to be read to know it"
    finally:
        validator.close()
