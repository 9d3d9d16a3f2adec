"""convert, inspect and check as a person would use them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.cli import adapters as commands
from app.cli.main import main
from app.engine.adapters.formats.arrow import CARD_SUFFIX, read_card
from app.engine.adapters.formats.peft import read_peft
from app.engine.errors import AdapterFormatError
from app.engine.models.spec import ModelSpec
from tests.engine.adapters.making import peft_config, peft_tensors, random_arrays, tiny_spec, write_peft

SPEC = tiny_spec()
ARRAYS = random_arrays(SPEC, 4, ["q_proj", "o_proj"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = peft_config(4, ["q_proj", "o_proj"], lora_alpha=-12)
    return write_peft(tmp_path / "sql", config, peft_tensors(ARRAYS))


@pytest.fixture(autouse=True)
def _tiny_base(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: dict[str, ModelSpec] = {"tiny": SPEC, "other": tiny_spec(1)}
    monkeypatch.setattr(commands, "_base_spec", specs.__getitem__)


def _run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_there_and_back_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = tmp_path / f"sql{CARD_SUFFIX}"
    assert _run("convert", folder, card, "--set", "author=ada", "--set", "description=SQL=fun") == 0
    assert read_card(card).name == "sql"
    assert read_card(card).metadata == {"author": "ada", "description": "SQL=fun"}
    assert _run("convert", card, tmp_path / "back") == 0
    assert read_peft(tmp_path / "back", SPEC).card == read_peft(folder, SPEC).card
    capsys.readouterr()
    assert _run("convert", card, tmp_path / "back") == 1
    assert "empty folder" in capsys.readouterr().err

    assert _run("inspect", card) == 0
    text = capsys.readouterr().out
    for words in ("ada", "SQL=fun", "4 in 2 layers (0 to 1)", "ranks        4", "scales       -3", "F32"):
        assert words in text
    norms = [3 * np.linalg.norm(b @ a) for (_, target), (a, b) in ARRAYS.items() if target == "q_proj"]
    assert f"q_proj               2  {np.mean(norms):.4g}" in text


def test_a_source_that_is_not_there_is_said_to_be_missing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("inspect", tmp_path / "absent") == 1
    assert "there is no file or folder 'absent'" in capsys.readouterr().err
    other = folder / "adapter_config.json"
    assert _run("inspect", other) == 1
    assert "is neither a PEFT folder nor" in capsys.readouterr().err


def test_rounding_is_reported(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = tmp_path / f"small{CARD_SUFFIX}"
    assert _run("convert", folder, card, "--quantize", "int4", "--name", "small sql") == 0
    written = capsys.readouterr().out
    report = read_card(card).quantization
    assert report is not None
    assert f"{report.mean_error:.2%} mean" in written
    assert _run("inspect", card) == 0
    text = capsys.readouterr().out
    assert f"{report.max_error:.2%} at most" in text
    assert "small sql" in text


def test_check_says_yes_or_why_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("check", folder, "--base", "tiny") == 0
    assert read_peft(folder, SPEC).card.digest in capsys.readouterr().out
    assert _run("check", folder, "--base", "other") == 1
    assert "no: " in (text := capsys.readouterr().out)
    assert "2 layers), and this base is 'tiny' (width 24, 1 layers)" in text


@pytest.mark.parametrize("pairs", [["a"], ["=b"], ["a=1", "a=2"]])
def test_metadata_is_key_and_text(pairs: list[str]) -> None:
    with pytest.raises(AdapterFormatError, match="KEY=TEXT"):
        commands.parse_metadata(pairs)


def test_without_a_base_it_is_that_of_the_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("applications: [{import_path: 'app.main:build', args: {model: {uri: tiny}}}]")
    assert _run("check", folder, "--config", config) == 0
    assert "yes: 4 modules of 'tiny'" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        _run("check", folder, "--config", config, "--base", "tiny")
