"""Adapters of mixtures of experts, in every layout that PEFT has had, give PEFT's logits through the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.adapters.formats.arrow import ArrowCard, read_card, write_card
from app.engine.adapters.formats.convert import write_peft_folder
from app.engine.adapters.formats.peft_experts import fuse_gate_up
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.cpu.backend import CpuBackend
from app.engine.errors import AdapterFormatError, AdapterMismatch
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.spec import ModelSpec
from tests.engine.adapters.moe_parity import (
    FAMILIES,
    FORMATS,
    PARAMETERS,
    PEFT_WARNINGS,
    check_one_lora_per_expert,
    edit,
    expected,
    is_transposed,
    names_of_old,
    per_expert_folder,
    save_random,
    tiny_mixture,
)
from tests.engine.adapters.parity import peft_logits, random_tokens
from tests.engine.served import CONFIG, served_logits

pytestmark = PEFT_WARNINGS


@pytest.fixture(scope="module", params=FAMILIES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(transformers' model, our backend) of one family."""
    folder = tmp_path_factory.mktemp("base")
    model = tiny_mixture(request.param)
    model.save_pretrained(folder)
    checkpoint = load_checkpoint(folder)
    backend = CpuBackend(checkpoint.spec, checkpoint.tensors(), CONFIG)
    yield model, backend
    backend.close()


def test_one_lora_per_expert_as_before_transformers_5(mixture: Any, tmp_path: Path) -> None:
    check_one_lora_per_expert(*mixture, tmp_path)


def test_layout_before_peft_0_19_is_told_by_shape_and_else_by_version(mixture: Any, tmp_path: Path) -> None:
    model, backend = mixture
    folder, tokens = tmp_path / "adapter", random_tokens(model)
    save_random(model, folder, FORMATS["all experts"])
    wanted = expected(model, tokens, folder)

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith("lora_A.weight")]:
            other = key.replace("lora_A", "lora_B")
            a, b, rank = tensors[key], tensors[other], 3
            by_rank = a.reshape(-1, rank, a.shape[1])  # [E, r, in]
            by_place = b.reshape(b.shape[0], rank, -1)  # [out, r, E]
            tensors[key] = by_place.permute(2, 1, 0).reshape(-1, b.shape[0])  # [E * r, out]
            tensors[other] = by_rank.permute(2, 1, 0).reshape(a.shape[1], -1)  # [in, r * E]

    edit(folder, tensors=swap, peft_version="0.18.1")
    if is_transposed(model):  # PEFT has never swapped these
        with pytest.raises(AdapterMismatch, match="does not say"):
            read_adapter(folder, backend.spec)
        return
    (found,) = served_logits(backend, [read_adapter(folder, backend.spec)], tokens)
    assert wanted.allows(found)


def test_a_card_and_a_folder_made_of_it_are_the_same_adapter(mixture: Any, tmp_path: Path) -> None:
    model, backend = mixture
    folder = tmp_path / "adapter"
    save_random(model, folder, FORMATS["router and experts"])
    stored = read_raw_adapter(folder, backend.spec)
    write_card(tmp_path / "a.lora.arrow", ArrowCard("a", stored, {}))
    digest = read_adapter(folder, backend.spec).card.digest
    assert read_adapter(tmp_path / "a.lora.arrow", backend.spec).card.digest == digest
    write_peft_folder(tmp_path / "again", read_card(tmp_path / "a.lora.arrow").raw)
    assert read_adapter(tmp_path / "again", backend.spec).card.digest == digest
    tokens = random_tokens(model)
    assert expected(model, tokens, folder).allows(peft_logits(model, tmp_path / "again", tokens))


def test_one_lora_per_expert_is_translated_to_what_peft_saves_today(mixture: Any, tmp_path: Path) -> None:
    model, backend = mixture
    per_expert_folder(model, tmp_path / "old", *names_of_old(model))
    use_rslora = model.config.model_type in ("mixtral", "gpt_oss")
    edit(tmp_path / "old", use_rslora=use_rslora)
    stored = fuse_gate_up(read_raw_adapter(tmp_path / "old", backend.spec), backend.spec)
    write_peft_folder(tmp_path / "new", stored)
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert all(name.endswith(("gate_up_proj", "down_proj")) for name in config["target_parameters"])
    assert 6 in (config["r"], *config["rank_pattern"].values()), "twice 3"
    tokens = random_tokens(model)
    (old,) = served_logits(backend, [read_adapter(tmp_path / "old", backend.spec)], tokens)
    (new,) = served_logits(backend, [read_adapter(tmp_path / "new", backend.spec)], tokens)
    wanted = expected(model, tokens, tmp_path / "new")
    assert wanted.allows(new)
    assert np.abs(new - old).max() <= (wanted.allowed if use_rslora else 0), "a root of two rounds"


def test_halves_of_another_rank_stay_what_they_are(tmp_path: Path) -> None:
    model = tiny_mixture("mixtral")
    model.save_pretrained(tmp_path / "base")
    spec = load_checkpoint(tmp_path / "base").spec
    per_expert_folder(model, tmp_path / "old", *names_of_old(model))
    edit(tmp_path / "old", alpha_pattern={r".*\.experts\.2\.w3": 9})
    with pytest.raises(AdapterFormatError, match=r"experts\.2\.gate_up_proj: gate and up differ.*as a card"):
        fuse_gate_up(read_raw_adapter(tmp_path / "old", spec), spec)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelSpec]:
    """A Mixtral whose experts are as wide as its hidden states: shapes say nothing of the layout of down_proj."""
    model = tiny_mixture("mixtral", intermediate_size=32)
    folder = tmp_path_factory.mktemp("square")
    model.save_pretrained(folder)
    return model, load_checkpoint(folder).spec


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "0.21.2"])
def test_version_decides_where_shapes_do_not(mixtral: tuple[Any, ModelSpec], tmp_path: Path, version: str) -> None:
    model, spec = mixtral
    save_random(model, tmp_path / "a", {"target_modules": [], "target_parameters": ["down_proj"], "r": 2})
    edit(tmp_path / "a", peft_version=version)
    weights = read_adapter(tmp_path / "a", spec).weights
    edit(tmp_path / "a", peft_version="0.21.2")
    as_new = read_adapter(tmp_path / "a", spec).weights
    same = all(np.array_equal(weights[key].a, as_new[key].a) for key in weights)
    assert same == (version != "0.18.1")


@pytest.mark.parametrize("version", ["", "0.19.0.dev0", "unknown"])
def test_a_version_that_does_not_tell_is_refused(mixtral: tuple[Any, ModelSpec], tmp_path: Path, version: str) -> None:
    model, spec = mixtral
    save_random(model, tmp_path / "a", {"target_modules": [], "target_parameters": ["down_proj"], "r": 2})
    edit(tmp_path / "a", peft_version=version)
    with pytest.raises(AdapterMismatch, match=r"layers\.0.*peft_version.*does not say.*layers\.1.*does not say"):
        read_adapter(tmp_path / "a", spec)


def _drop(part: str) -> Any:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if part in key]:
            del tensors[key]

    return drop


@pytest.mark.parametrize(
    ("settings", "change", "error", "message"),
    [
        ("all experts", {"tensors": _drop("layers.0.mlp.experts.lora_B")}, AdapterFormatError, "has no lora_B"),
        ("all experts", {"tensors": _drop("base_layer")}, AdapterMismatch, r"0.*gate_up_proj is selected.*1.*gate_up"),
        ("all experts", {"target_parameters": PARAMETERS[:1]}, AdapterMismatch, r"is not selected by.*maps 24 to 32"),
        ("all experts", {"r": 2}, AdapterMismatch, r"of rank 2 is of 6 experts.*has 4"),
        ("all experts", {"r": 5}, AdapterMismatch, r"do not divide into experts of rank 5"),
        ("all experts", {"use_dora": True}, AdapterFormatError, "'use_dora' with target_parameters"),
        ("all experts", {"target_parameters": [*PARAMETERS, "w1"]}, AdapterMismatch, "names 'w1', which"),
        ("attention", {"target_parameters": PARAMETERS}, AdapterMismatch, "but has no tensors"),
        ("attention", {"target_parameters": "gate_up_proj"}, AdapterFormatError, "must be a list"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    tmp_path: Path, settings: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = tiny_mixture("mixtral")
    model.save_pretrained(tmp_path / "base")
    save_random(model, tmp_path / "adapter", FORMATS[settings])
    edit(tmp_path / "adapter", **change)
    with pytest.raises(error, match=message):
        read_adapter(tmp_path / "adapter", load_checkpoint(tmp_path / "base").spec)


def test_experts_of_a_dense_layer_are_refused_with_everything_else(tmp_path: Path) -> None:
    model = tiny_mixture("qwen2_moe")
    model.save_pretrained(tmp_path / "base")
    save_random(model, tmp_path / "adapter", FORMATS["all experts"])

    def move(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace("layers.1", "layers.0")] = tensors.pop(key)

    edit(tmp_path / "adapter", tensors=move)
    with pytest.raises(AdapterMismatch, match=r"layers\.1.*has no tensors.*but layer 0 of 'base' has none"):
        read_adapter(tmp_path / "adapter", load_checkpoint(tmp_path / "base").spec)


def test_an_adapter_pays_for_its_own_experts_and_modules(tmp_path: Path) -> None:
    model = tiny_mixture("olmoe")
    model.save_pretrained(tmp_path / "base")
    spec = load_checkpoint(tmp_path / "base").spec
    sizes = {}
    for name in ("attention", "only down", "all experts"):
        save_random(model, tmp_path / name, FORMATS[name])
        sizes[name] = read_adapter(tmp_path / name, spec).card.extra_bytes
    # Rows of a come in eights, columns of b in sixteens; gate and up share theirs. 2 layers of 4
    # experts, 32 wide outside and 24 inside.
    assert sizes == {
        "attention": 0,
        "only down": 4 * 2 * 4 * (16 * 24 + 9 * 32),
        "all experts": 4 * 2 * 4 * (8 * 32 + 2 * 3 * 32 + 8 * 24 + 3 * 32),
    }
