"""Adapters saved by PEFT give PEFT's logits."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.config import MontecloraConfig, VeloraConfig
from safetensors.torch import load_file, save_file

from app.engine.adapters.adapter import LoraKey
from app.engine.adapters.features import FEATURES, MAY_BE_COPIES
from app.engine.adapters.formats.arrow import ArrowCard, read_card, write_card
from app.engine.adapters.formats.convert import write_peft_folder
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.cpu.backend import CpuBackend
from app.engine.errors import AdapterMismatch
from tests.engine.adapters.parity import (
    base_logits,
    our_logits,
    peft_logits,
    random_tokens,
    save_random_adapter,
    spec_of,
    tiny_model,
)
from tests.engine.served import backend_of, served_logits
from tests.pairwise import pairwise

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOLERANCE = 1e-5
#: Families that are also run through the engine.
SERVED = ("llama", "qwen2", "tied")

PEFT_WARNINGS = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's own use
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True:UserWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'. [0-9]* LoRA tensor"),  # lora_bias is a vector
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`:UserWarning"),
    pytest.mark.filterwarnings("ignore:ensure_weight_tying=True but the model:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match"),  # of a base that is not tied
]
pytestmark = PEFT_WARNINGS

#: One row per supported option: what is asked of PEFT, by name.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain LoRA": {"target_modules": ALL},
    "one target": {"target_modules": ["down_proj"]},
    "rank 1": {"target_modules": ["q_proj", "v_proj"], "r": 1},
    "rank above the module's width": {"target_modules": ["k_proj"], "r": 40},
    "rsLoRA": {"target_modules": ALL, "use_rslora": True},
    "negative alpha": {"target_modules": ALL, "lora_alpha": -5},
    "zero alpha": {"target_modules": ALL, "lora_alpha": 0},
    "fractional alpha": {"target_modules": ALL, "lora_alpha": 0.3},
    "rank_pattern": {
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 7, "^model.layers.2.self_attn.k_proj": 5},
    },
    "alpha_pattern": {
        "target_modules": ALL,
        "alpha_pattern": {"0.self_attn.q_proj": -1, r".*\.(up|down)_proj": 11, "q_proj": 2.5},
    },
    "rank_pattern and alpha_pattern with rsLoRA": {
        "target_modules": ALL,
        "use_rslora": True,
        "rank_pattern": {"o_proj": 6, "layers.0.mlp.gate_proj": 1},
        "alpha_pattern": {"o_proj": 1, r"layers\.\d\.mlp\.gate_proj": 9},
    },
    "regex target_modules": {"target_modules": r".*\.layers\.[02]\.(self_attn|mlp)\.(q|v|up)_proj"},
    "all-linear target_modules": {"target_modules": "all-linear"},
    "full path in target_modules": {"target_modules": ["model.layers.1.mlp.up_proj", "k_proj"]},
    "layers_to_transform": {"target_modules": ALL, "layers_to_transform": [0, 2]},
    "layers_to_transform and layers_pattern": {
        "target_modules": ["q_proj", "model.layers.0.mlp.up_proj"],
        "layers_to_transform": 1,
        "layers_pattern": ["layers"],
    },
    "exclude_modules list": {"target_modules": ALL, "exclude_modules": ["layers.1.self_attn.q_proj", "up_proj"]},
    "exclude_modules regex": {"target_modules": ALL, "exclude_modules": r".*\.1\..*"},
    "fan_in_fan_out": {"target_modules": ALL, "fan_in_fan_out": True},
    "init gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "init orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "init false": {"target_modules": ["q_proj"], "init_lora_weights": False},
    "init MiCA": {"target_modules": ["q_proj"], "init_lora_weights": "MiCA"},
    "dropout": {"target_modules": ["q_proj"], "lora_dropout": 0.5},
    "VeLoRA": {"target_modules": ["q_proj", "up_proj"], "velora_config": VeloraConfig()},
    "MonteCLoRA": {"target_modules": ["q_proj"], "monteclora_config": MontecloraConfig(num_samples=2)},
    "look-ahead in target_modules": {"target_modules": r"^(?!.*layers\.1\.)(?=.*self_attn).*(?<!o)_proj$"},
    "flags and groups in target_modules": {"target_modules": r"(?ix) MODEL\.layers\.(?P<n>\d{,2})\. .* (\w)_proj \Z"},
    "look-around in exclude_modules": {"target_modules": ALL, "exclude_modules": r".*(?<=self_attn\.)(?!q_proj).+"},
    "look-around in rank_pattern and alpha_pattern": {
        "target_modules": ALL,
        "rank_pattern": {r"^(?!.*\.1\.).*up_proj": 2, r"mlp\.(?!up|down)\w+": 5},
        "alpha_pattern": {r"self_attn\.(?=[qk])\w_proj": 9, r"(?:.(?!\.2\.))*down_proj": 3},
    },
    "regex layers_pattern": {
        "target_modules": ALL,
        "layers_to_transform": [0, 2],
        "layers_pattern": ["h", r"(?!h)[a-z]+s"],
    },
    "ensure_weight_tying without an embedding": {"target_modules": ["q_proj"], "ensure_weight_tying": True},
}

#: Options beyond plain LoRA: what is asked of PEFT, and the features the adapter then needs.
BEYOND: dict[str, tuple[dict[str, Any], set[str]]] = {
    "DoRA": ({"target_modules": ALL, "use_dora": True}, {"DoRA"}),
    "DoRA with rsLoRA and patterns": (
        {"target_modules": ALL, "use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}},
        {"DoRA"},
    ),
    "lora_bias": ({"target_modules": ALL, "lora_bias": True, "lora_alpha": -3}, {"lora_bias"}),
    'bias="all"': ({"target_modules": ["q_proj", "up_proj"], "bias": "all"}, {"trained biases"}),
    'bias="lora_only"': ({"target_modules": ["q_proj", "up_proj"], "bias": "lora_only"}, {"trained biases"}),
    "embedding LoRA": (
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"embedding LoRA", "trained embedding"},
    ),
    "lm_head LoRA": ({"target_modules": ["q_proj", "lm_head"]}, {"lm_head LoRA", "trained lm_head"}),
    "embedding and lm_head LoRA": (
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 2}},
        {"embedding LoRA", "lm_head LoRA", "trained embedding", "trained lm_head"},
    ),
    "modules_to_save norms": (
        {"target_modules": ["q_proj"], "modules_to_save": ["norm", "input_layernorm"]},
        {"trained norms"},
    ),
    "modules_to_save lm_head": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"trained lm_head"},
    ),
    "modules_to_save embed_tokens": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"trained embedding"},
    ),
    "modules_to_save a linear module": (
        {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["layers.1.mlp.down_proj"]},
        {"trained linear weights"},
    ),
    "trainable_token_indices": (
        {"target_modules": ["q_proj"], "trainable_token_indices": [9, 5, 60]},
        {"trained token rows"},
    ),
    "embedding LoRA with ensure_weight_tying": (
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"embedding LoRA", "trained embedding"},
    ),
    "lm_head LoRA with ensure_weight_tying and a pattern": (
        {"target_modules": ".*(q_proj|lm_head)", "ensure_weight_tying": True, "rank_pattern": {"embed_tokens": 2}},
        {"lm_head LoRA", "trained lm_head"},
    ),
    "modules_to_save with ensure_weight_tying": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
        {"trained lm_head"},
    ),
    "trainable_token_indices with ensure_weight_tying": (
        {"target_modules": ["q_proj"], "trainable_token_indices": [9, 5], "ensure_weight_tying": True},
        {"trained token rows"},
    ),
    "trainable_token_indices by module": (
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [9, 5], "lm_head": [9, 5]}},
        {"trained token rows"},
    ),
}

#: Targets saved fused: what is asked of PEFT on a model that has them so.
FUSED: dict[str, dict[str, Any]] = {
    "targets saved fused: qkv_proj": {"target_modules": ["qkv_proj"]},
    "targets saved fused: gate_up_proj": {"target_modules": ["gate_up_proj"]},
    "targets saved fused: all": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "targets saved fused: all-linear": {"target_modules": "all-linear"},
}
#: Types that tensors are saved in, beside float32.
HALVES = {"bf16 tensors": torch.bfloat16, "f16 tensors": torch.float16}


@cache
def _model(family: str) -> Any:
    """A family's tiny model; "tied" is a Llama whose output is its embedding, and the others are not tied."""
    return (
        tiny_model("llama", tie_word_embeddings=True)
        if family == "tied"
        else tiny_model(family, tie_word_embeddings=False)
    )


@cache
def _backend(family: str) -> CpuBackend:
    with TemporaryDirectory() as folder:
        return backend_of(_model(family), Path(folder))


def _check(family: str, folder: Path) -> float:
    """Our logits are PEFT's, by plain formulas and from the engine; returns how far both are from the base's."""
    model = _model(family)
    tokens = random_tokens(model)
    adapter = read_adapter(folder, spec_of(model), supported_features=FEATURES)
    expected = peft_logits(model, folder, tokens)
    base = base_logits(model, tokens)
    np.testing.assert_allclose(our_logits(model, adapter, tokens), expected, rtol=0, atol=TOLERANCE)
    if family in SERVED:
        backend = _backend(family)
        (served,) = served_logits(backend, [adapter], tokens)
        np.testing.assert_allclose(served, expected, rtol=0, atol=TOLERANCE)
    return float(np.abs(expected - base).max())


@pairwise({"family": ["qwen2", "tied"], "option": BEYOND}, strength=1)
def test_option_beyond_plain_lora_gives_pefts_logits(tmp_path: Path, family: str, option: str) -> None:
    options, features = BEYOND[option]
    folder = tmp_path / "peft"
    model = _model(family)
    save_random_adapter(model, folder, _config(options))
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    for name in tensors:
        if name.endswith(".base_layer.weight"):  # PEFT saves the base's; make it the adapter's own
            tensors[name] *= 1.1
    save_file(tensors, weights)
    assert _check(family, folder) > 1e-3
    needed = read_adapter(folder, spec_of(model), supported_features=FEATURES).features
    assert needed >= (features if family == "qwen2" else features - {"trained biases"})
    for feature in needed - MAY_BE_COPIES:  # of these BaseWeightDedup decides
        with pytest.raises(AdapterMismatch, match=feature):
            read_adapter(folder, spec_of(model), supported_features=FEATURES - {feature})
    assert read_adapter(folder, spec_of(model), supported_features=needed).features == needed
    _check_round_trip(model, folder)


def _check_round_trip(model: Any, folder: Path) -> None:
    """Folder -> card -> folder: PEFT finds the same tensors and gives the same logits, to the bit."""
    card, again, tokens = folder.parent / "it.lora.arrow", folder.parent / "again", random_tokens(model)
    write_card(card, ArrowCard("it", read_raw_adapter(folder, None), {}))
    write_peft_folder(again, read_card(card).raw)
    before, after = (load_file(path / "adapter_model.safetensors") for path in (folder, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    np.testing.assert_array_equal(peft_logits(model, again, tokens), peft_logits(model, folder, tokens))
    spec = spec_of(model)
    digests = {read_adapter(path, spec, supported_features=FEATURES).card.digest for path in (folder, card, again)}
    assert len(digests) == 1


def _config(options: dict[str, Any]) -> LoraConfig:
    return LoraConfig(
        **({"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 2} | deepcopy(options))
    )  # PEFT writes into it


@pairwise({"family": ["llama", "qwen2"], "option": OPTIONS}, strength=1)
def test_option_gives_pefts_logits(tmp_path: Path, family: str, option: str) -> None:
    save_random_adapter(_model(family), tmp_path, _config(OPTIONS[option]))
    moved = _check(family, tmp_path)
    assert (moved == 0) == (option == "zero alpha")
    assert moved == 0 or moved > 1e-3


@pytest.mark.parametrize("option", FUSED)
def test_fused_targets_give_pefts_logits(tmp_path: Path, option: str) -> None:
    options = FUSED[option] | {"alpha_pattern": {r"layers.1.*_proj": 7}}
    save_random_adapter(_model("phi3"), tmp_path, _config(options))
    assert _check("phi3", tmp_path) > 1e-3
    adapter = read_adapter(tmp_path, spec_of(_model("phi3")))
    if LoraKey(0, "q_proj") in adapter.weights:
        shared = [adapter.weights[LoraKey(0, name)].a for name in ("q_proj", "k_proj", "v_proj")]
        assert shared[0] is shared[1] is shared[2]


@pytest.mark.parametrize("option", HALVES)
def test_half_precision_tensors_give_pefts_logits(tmp_path: Path, option: str) -> None:
    save_random_adapter(_model("llama"), tmp_path, _config({"target_modules": ALL}))
    halve(tmp_path, HALVES[option])
    assert _check("llama", tmp_path) > 1e-3


def halve(folder: Path, dtype: torch.dtype) -> None:
    """Round a saved adapter's tensors."""
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)


def test_a_module_left_out_would_be_noticed(tmp_path: Path) -> None:
    """The comparison can fail: one module's delta missing moves the logits far beyond the tolerance."""
    from dataclasses import replace

    model = _model("llama")
    save_random_adapter(model, tmp_path, _config({"target_modules": ALL}))
    adapter = read_adapter(tmp_path, spec_of(model))
    tokens = random_tokens(model)
    expected = peft_logits(model, tmp_path, tokens)
    for key in adapter.weights:
        fewer = {other: pair for other, pair in adapter.weights.items() if other != key}
        wrong = our_logits(model, replace(adapter, weights=fewer), tokens)
        assert np.abs(wrong - expected).max() > 10 * TOLERANCE, key
