"""A merged folder holds what PEFT's `merge_and_unload` gives, and transformers loads it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from app.cli.main import main
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.merge import merge
from app.engine.errors import AdapterMismatch
from app.engine.models.checkpoint import load_checkpoint
from tests.engine.adapters.formats.test_peft_parity import ALL, PEFT_WARNINGS
from tests.engine.adapters.moe_parity import FAMILIES
from tests.engine.adapters.moe_parity import PEFT_WARNINGS as WARNINGS_OF_EXPERTS
from tests.engine.adapters.parity import save_random_adapter, tiny_model

pytestmark = [*PEFT_WARNINGS, *WARNINGS_OF_EXPERTS]

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ALL, "r": 4}),
    "rsLoRA and patterns": ("qwen2", {"target_modules": ALL, "use_rslora": True, "rank_pattern": {"q_proj": 3}}),
    "DoRA": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "lora_bias": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "trained norms": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "trained biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    "lora_bias and trained biases": (
        "qwen2",
        {"target_modules": ["q_proj", "v_proj"], "lora_bias": True, "bias": "all"},
    ),
}


def saved(folder: Path, family: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A base in `base` and an adapter of it in `adapter`."""
    model = tiny_model(family, tie_word_embeddings=False).to(dtype)
    model.save_pretrained(folder / "base")
    save_random_adapter(model, folder / "adapter", LoraConfig(task_type="CAUSAL_LM", **options))
    return model


@pytest.mark.parametrize("option", OPTIONS)
def test_merged_is_what_peft_merges(option: str, tmp_path: Path) -> None:
    family, options = OPTIONS[option]
    model = saved(tmp_path, family, options)
    checkpoint = load_checkpoint(tmp_path / "base")
    adapter = read_adapter(tmp_path / "adapter", checkpoint.spec, supported_features=FEATURES)
    assert merge(checkpoint, adapter, tmp_path / "merged") == len(adapter.weights)
    expected = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    changed = 0
    for name, values in found.items():
        np.testing.assert_allclose(values.numpy(), expected[name].numpy(), atol=1e-6, err_msg=name)
        changed += not torch.equal(values, model.state_dict()[name])
    assert changed >= 1
    assert load_checkpoint(tmp_path / "merged").spec.digest != checkpoint.spec.digest


EXPERTS = {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2"])
def test_a_mixtures_experts_are_merged_whatever_their_tensors_are_called(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).float().eval()
    model.save_pretrained(tmp_path / "base")
    save_random_adapter(model, tmp_path / "adapter", LoraConfig(task_type="CAUSAL_LM", r=4, **EXPERTS))
    checkpoint = load_checkpoint(tmp_path / "base")
    merge(
        checkpoint,
        read_adapter(tmp_path / "adapter", checkpoint.spec, supported_features=FEATURES),
        tmp_path / "merged",
    )
    expected = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").float().state_dict()
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_allclose(values.numpy(), expected[name].numpy(), atol=1e-6, err_msg=name)
    changed = {name for name, values in found.items() if not torch.equal(values, model.state_dict()[name])}
    assert {name.rsplit(".", 1)[-1] for name in changed if "experts" in name} == {"gate_up_proj", "down_proj"}
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("base", "merged")]
    assert names[0] == names[1]


def test_experts_in_one_tensor_are_refused_by_name(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["gpt_oss"]()).float().eval()
    model.save_pretrained(tmp_path / "base")
    save_random_adapter(model, tmp_path / "adapter", LoraConfig(task_type="CAUSAL_LM", r=4, **EXPERTS))
    checkpoint = load_checkpoint(tmp_path / "base")
    adapter = read_adapter(tmp_path / "adapter", checkpoint.spec, supported_features=FEATURES)
    with pytest.raises(AdapterMismatch, match=r"no tensor of their own for .*experts\.down_proj"):
        merge(checkpoint, adapter, tmp_path / "merged")


def test_each_tensor_keeps_its_type_and_its_file(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama", {"target_modules": ["q_proj"], "r": 4}, torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    (tmp_path / "base" / "model.safetensors").unlink()
    checkpoint = load_checkpoint(tmp_path / "base")
    merge(checkpoint, read_adapter(tmp_path / "adapter", checkpoint.spec), tmp_path / "merged")
    shards = sorted(path.name for path in (tmp_path / "base").glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors")) == shards
    merged = dict(load_checkpoint(tmp_path / "merged").tensors())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert {values.dtype.name for values in merged.values()} == {"bfloat16"}
    assert not np.array_equal(merged[name], dict(checkpoint.tensors())[name])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head LoRA and trained lm_head cannot be merged"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [5]}, "trained token rows cannot be merged"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved(tmp_path, "qwen2", options)
    checkpoint = load_checkpoint(tmp_path / "base")
    adapter = read_adapter(tmp_path / "adapter", checkpoint.spec, supported_features=FEATURES)
    with pytest.raises(AdapterMismatch, match=said):
        merge(checkpoint, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists(), "nothing is written"


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, "llama", {"target_modules": ["q_proj"], "r": 4})
    command = ["merge", str(tmp_path / "adapter"), str(tmp_path / "merged"), "--base", str(tmp_path / "base")]
    assert main(command) == 0
    assert f"wrote {tmp_path / 'merged'}: 3 modules merged" in capsys.readouterr().out
    assert main(command) == 1
    assert "exists and is not an empty folder" in capsys.readouterr().err
