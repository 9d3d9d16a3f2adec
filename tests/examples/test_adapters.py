"""The committed demo adapters: small, bfloat16, complete, with the shape their recipe says and no local path."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.config import DEFAULT_MODEL_URI
from app.model_names import base_warning
from examples.training.recipes import RECIPES

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
MAX_SIZE_BYTES = 3_000_000
NUM_LAYERS = 30
SHAPES = {  # target: (d_in, d_out) of the demo base
    "q_proj": (576, 576),
    "k_proj": (576, 192),
    "v_proj": (576, 192),
    "o_proj": (576, 576),
    "gate_proj": (576, 1536),
    "up_proj": (576, 1536),
    "down_proj": (1536, 576),
}
NAMES = sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())
KEY = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Each adapter in turn."""
    return str(request.param)


def config(name: str) -> dict[str, Any]:
    """The adapter_config.json of one adapter."""
    found: dict[str, Any] = json.loads((ADAPTERS / name / "adapter_config.json").read_text(encoding="utf-8"))
    return found


def test_every_folder_has_a_recipe() -> None:
    assert sorted(RECIPES) == NAMES


def test_config_agrees_with_recipe(name: str) -> None:
    found, recipe = config(name), RECIPES[name]
    assert found["peft_type"] == "LORA"
    assert found["base_model_name_or_path"] == "SmolLM2-135M-Instruct"
    assert base_warning(found["base_model_name_or_path"], "base", DEFAULT_MODEL_URI) is None
    assert (found["r"], found["lora_alpha"], found["use_rslora"]) == (recipe.rank, recipe.alpha, recipe.use_rslora)
    assert sorted(found["target_modules"]) == sorted(recipe.targets)


def test_weights_are_complete_and_bfloat16(name: str) -> None:
    path, recipe = ADAPTERS / name / "adapter_model.safetensors", RECIPES[name]
    assert path.stat().st_size <= MAX_SIZE_BYTES
    expected = {}
    for layer in range(NUM_LAYERS):
        for target in recipe.targets:
            d_in, d_out = SHAPES[target]
            expected[str(layer), target, "A"] = (recipe.rank, d_in)
            expected[str(layer), target, "B"] = (d_out, recipe.rank)
    weights = load_file(path)
    found = {}
    for key, weight in weights.items():
        match = KEY.fullmatch(key)
        assert match is not None, key
        found[match.groups()] = tuple(weight.shape)
        assert weight.dtype == torch.bfloat16, key
        assert bool(torch.isfinite(weight).all()), key
        assert bool(weight.any()), f"{key} is all zero: never trained"
    assert found == expected


def test_adapters_differ_in_rank_targets_and_scaling() -> None:
    recipes = list(RECIPES.values())
    assert len({recipe.rank for recipe in recipes}) == len(recipes)
    assert len({recipe.targets for recipe in recipes}) == len(recipes)
    assert {recipe.use_rslora for recipe in recipes} == {True, False}


def test_nothing_local_is_committed(name: str) -> None:
    files = {path.name for path in (ADAPTERS / name).iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    for text_file in ("README.md", "adapter_config.json"):
        assert re.search(r"/(?:work|tmp|home|root)\b", (ADAPTERS / name / text_file).read_text()) is None


def test_card_says_what_the_adapter_does(name: str) -> None:
    card = (ADAPTERS / name / "README.md").read_text(encoding="utf-8")
    assert RECIPES[name].task.description in card
    assert "base_model: SmolLM2-135M-Instruct" in card
