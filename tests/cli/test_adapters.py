"""convert, inspect and check as a person would use them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.cli import adapters as commands
from app.cli.main import main
from app.deployments.registry.pins import EngineCapacity
from app.engine.adapters.formats.arrow import CARD_SUFFIX, ArrowCard, read_card, write_card
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.raw_adapter import RawAdapter, RawModule
from app.engine.errors import AdapterFormatError
from app.engine.models.checkpoint import in_arithmetic
from app.engine.models.spec import ExpertsSpec, ModelSpec, RouterSpec
from tests.engine.adapters.random_adapters import (
    peft_config,
    peft_tensors,
    random_arrays,
    stored_tensor,
    tiny_spec,
    write_peft,
)

SPEC = tiny_spec()
ARRAYS = random_arrays(SPEC, 4, ["q_proj", "o_proj"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = peft_config(4, ["q_proj", "o_proj"], lora_alpha=-12)
    return write_peft(tmp_path / "sql", config, peft_tensors(ARRAYS))


@pytest.fixture(autouse=True)
def _tiny_base(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: dict[str, ModelSpec] = {"tiny": SPEC, "hf://org/tiny@main": SPEC, "other": tiny_spec(1)}
    monkeypatch.setattr(commands, "_base_spec", specs.__getitem__)


def _run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_there_and_back_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = tmp_path / f"sql{CARD_SUFFIX}"
    assert _run("convert", folder, card, "--set", "author=ada", "--set", "description=SQL=fun") == 0
    assert read_card(card).name == "sql"
    assert read_card(card).metadata == {"author": "ada", "base_model_name_or_path": "tiny", "description": "SQL=fun"}
    assert _run("convert", card, tmp_path / "back") == 0
    assert read_adapter(tmp_path / "back", SPEC).card == read_adapter(folder, SPEC).card
    capsys.readouterr()
    assert _run("convert", card, tmp_path / "back") == 1
    assert "empty folder" in capsys.readouterr().err

    assert _run("inspect", card) == 0
    text = capsys.readouterr().out
    for words in ("ada", "SQL=fun", "4 in 2 layers (0 to 1)", "ranks        4", "scales       -3", "F32"):
        assert words in text
    arrays = [(a, b.astype(np.float64)) for (_, target), (a, b) in ARRAYS.items() if target == "q_proj"]
    norms = [3 * np.linalg.norm(b @ a) for a, b in arrays]
    assert f"q_proj               2  {np.mean(norms):.4g}" in text


def test_a_stranger_s_text_does_not_control_the_terminal(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / f"sql{CARD_SUFFIX}"
    assert _run("convert", folder, card, "--set", "description=x\x1b[2J\nranks        64\u202e") == 0
    capsys.readouterr()
    assert _run("inspect", card) == 0
    out = capsys.readouterr().out
    assert r"x\x1b[2J\nranks        64\u202e" in out
    assert all(line.isprintable() for line in out.splitlines())
    assert _run("check", tmp_path / "no\x1b]0;title\x07") == 1
    assert r"no\x1b]0;title\x07" in capsys.readouterr().err


def test_an_activated_adapter_says_by_which_tokens(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("inspect", folder) == 0
    assert "activated" not in capsys.readouterr().out
    config = peft_config(4, ["q_proj", "o_proj"], alora_invocation_tokens=[3, 1, 4])
    write_peft(folder, config, peft_tensors(ARRAYS))
    card = tmp_path / f"sql{CARD_SUFFIX}"
    assert _run("convert", folder, card) == 0
    for source in (folder, card):
        assert _run("inspect", source) == 0
        assert "activated    from the last 3, 1, 4 of a prompt on" in capsys.readouterr().out


def test_a_source_that_is_not_there_is_said_to_be_missing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("inspect", "check"):
        assert _run(command, tmp_path / "absent") == 1
        assert f"there is no file or folder '{tmp_path / 'absent'}'" in capsys.readouterr().err
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
    assert read_adapter(folder, SPEC).card.digest in capsys.readouterr().out
    assert _run("check", folder, "--base", "hf://org/tiny@main") == 0
    assert "yes: 4 modules of 'hf://org/tiny@main'" in capsys.readouterr().out
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
    assert "yes: 4 modules of 'smollm2-135m-instruct (tiny)'" in capsys.readouterr().out
    config.write_text("applications: [{import_path: 'app.main:build', args: {model: {uri: tiny, name: tiny}}}]")
    assert _run("check", folder, "--config", config) == 0
    assert "yes: 4 modules of 'tiny'" in capsys.readouterr().out
    small = "applications: [{import_path: 'app.main:build', args: {model: {uri: tiny}, engine: {lora_pool_rows: 0}}}]"
    (tmp_path / "small.yaml").write_text(small)
    assert _run("check", folder, "--config", tmp_path / "small.yaml") == 1
    assert f"no: adapter '{folder.name}' has rank 4 and an engine holds at most rank 0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        _run("check", folder, "--config", config, "--base", "tiny")


def test_digests_are_those_of_the_settings_arithmetic(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signature is of a digest: a server that computes in int8 accepts what was signed with its settings."""
    spec = replace(SPEC, digest="ab" * 32)
    monkeypatch.setattr(commands, "_base_spec", {"tiny": spec}.__getitem__)
    config, key = tmp_path / "serve.yaml", tmp_path / "key"
    arguments = "{model: {uri: tiny}, engine: {cpu: {compute: int8}}}"
    config.write_text(f"applications: [{{import_path: 'app.main:build', args: {arguments}}}]")
    digest = read_adapter(folder, in_arithmetic(spec, "int8")).card.digest
    assert digest != read_adapter(folder, spec).card.digest
    assert _run("check", folder, "--config", config) == 0
    assert f"digest {digest}" in capsys.readouterr().out
    assert _run("keygen", key) == 0
    assert _run("sign", folder, "--key", key, "--config", config) == 0
    assert digest[:12] in capsys.readouterr().out


def test_experts_are_counted(tmp_path: Path) -> None:
    """Two of four experts in one of the layers at rank 2, 24 wide outside and 40 inside; rows come in panels."""
    layer = SPEC.layers[0]
    mixture = replace(SPEC, layers=(replace(layer, experts=ExpertsSpec(RouterSpec(4, 2, normalised=True))),) * 2)
    modules = [
        RawModule(
            f"model.layers.1.mlp.experts.{expert}.down_proj", stored_tensor(np.ones((2, 40))),
            stored_tensor(np.ones((24, 2))), 2.0, use_rslora=False,
        )
        for expert in (1, 3)
    ]  # fmt: skip
    stored = RawAdapter(tuple(modules))
    lines = "\n".join(commands.report(stored))
    assert "experts      2 different in 1 layers, 2 in all" in lines
    assert "experts.down_proj" in lines
    card = tmp_path / f"experts{CARD_SUFFIX}"
    write_card(card, ArrowCard("experts", stored, {}))
    assert f"2 of them are experts'; besides rank rows it holds {4 * 2 * (8 * 40 + 2 * 32)} bytes" in commands.fits(
        card, mixture, EngineCapacity()
    )


def test_convert_puts_an_experts_gate_and_up_together_where_the_base_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = replace(SPEC, layers=(replace(SPEC.layers[0], experts=ExpertsSpec(RouterSpec(2, 1, normalised=True))),))
    monkeypatch.setattr(commands, "_base_spec", {"mixture": mixture}.__getitem__)
    tensors, names = {}, ["gate_proj", "up_proj"]
    for expert in range(2):
        for name in names:
            path = f"base_model.model.model.layers.0.mlp.experts.{expert}.{name}"
            tensors |= {f"{path}.lora_A.weight": np.ones((2, 24), np.float32)}
            tensors |= {f"{path}.lora_B.weight": np.ones((40, 2), np.float32)}
    write_peft(tmp_path / "old", peft_config(2, names), tensors)
    assert _run("convert", tmp_path / "old", tmp_path / "new", "--base", "mixture") == 0
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4)
    assert config["target_parameters"] == ["model.layers.0.mlp.experts.gate_up_proj"]
