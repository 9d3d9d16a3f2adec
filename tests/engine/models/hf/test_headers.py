"""Families that only vLLM computes: their layers' modules are those of the library's model, and adapters fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file

from app.cli.preflight import check_model
from app.config import AppConfig
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import EngineConfig
from app.engine.errors import AdapterMismatch, CheckpointError, ConfigError
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.memory_estimate import num_weights
from app.engine.vllm.lora_folder import LoraFolders
from tests.engine.running import FAKE_WORKER, Served, vllm_section

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES: dict[str, Any] = {
    **{"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
#: q, k, v and gate, up apart; fused in the checkpoint; a feed-forward without a gate.
FAMILIES = {"granite": "GraniteConfig", "phi3": "Phi3Config", "starcoder2": "Starcoder2Config"}


def write(folder: Path, family: str, **sizes: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    config = getattr(transformers, FAMILIES[family])(**SIZES | {"tie_word_embeddings": False} | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def write_adapter(folder: Path, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """PEFT's adapter on these modules, or on all linear ones, large enough to change tokens."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **options}
    trained = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    trained.save_pretrained(folder)
    return trained


@pytest.mark.parametrize("family", FAMILIES)
def test_the_modules_of_a_layer_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    model = write(tmp_path, family)
    spec = load_checkpoint(tmp_path, "tiny").spec
    linear = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    found = {
        f"model.layers.{layer}.{module.kind.path(target)}": (width, module.d_in)
        for layer in range(len(spec.layers))
        for module in layer_linear_modules(spec, layer)
        for target, width in zip(module.targets, module.widths, strict=True)
    }
    assert found == linear
    assert (spec.family, spec.vocab_size, spec.max_positions, spec.tie_embeddings) == (family, 100, 256, False)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    ends = 2 * 100 * 64
    assert num_weights(spec) == sum(rows * columns for rows, columns in linear.values()) + ends


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_reaches_vllm_as_it_was_trained(tmp_path: Path, family: str) -> None:
    trained = write_adapter(tmp_path / "lora", write(tmp_path / "model", family))
    spec = load_checkpoint(tmp_path / "model", "tiny").spec
    folders = LoraFolders(spec, max_lora_rank=8)
    try:
        tensors = load_file(folders.write(read_adapter(tmp_path / "lora", spec)) / "adapter_model.safetensors")
    finally:
        folders.close()
    layers = {name: module for name, module in trained.named_modules() if hasattr(module, "lora_A")}
    assert len(tensors) == 2 * len(layers)
    for name, module in layers.items():
        a, b = (tensors[f"{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        delta = module.get_delta_weight("default").detach().numpy()  # type: ignore[operator]
        assert np.abs(b @ a - delta).max() < 1e-6


def test_a_known_module_may_be_named_in_the_adapter_as_one(tmp_path: Path) -> None:
    """Granite's query, key and value are apart; what is not there, or is of another size, is refused by name."""
    model = write(tmp_path / "model", "granite")
    write_adapter(tmp_path / "lora", model, target_modules=["q_proj"])
    write(tmp_path / "other", "phi3")
    with pytest.raises(AdapterMismatch, match="q_proj"):
        read_adapter(tmp_path / "lora", load_checkpoint(tmp_path / "other").spec)
    write(tmp_path / "wide", "granite", hidden_size=128)
    with pytest.raises(AdapterMismatch):
        read_adapter(tmp_path / "lora", load_checkpoint(tmp_path / "wide").spec)


def test_only_vllm_is_offered_the_weights(tmp_path: Path) -> None:
    write(tmp_path, "granite")
    checkpoint = load_checkpoint(tmp_path, "tiny")
    says = "model_type 'granite' is not among the supported families"
    for use in (checkpoint.tensors, lambda: load_backend(checkpoint, EngineConfig())):
        with pytest.raises(CheckpointError, match=says):
            use()
    settings = AppConfig.model_validate({"model": {"uri": str(tmp_path), "name": "tiny"}})
    with pytest.raises(ConfigError, match=rf"{says}.*set engine\.vllm"):
        check_model(settings, tmp_path)
    with_vllm = AppConfig.model_validate({"model": settings.model, "engine": {"vllm": {"python": "python"}}})
    assert check_model(with_vllm, tmp_path) == checkpoint.spec


def test_what_headers_do_not_say_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "granite")
    config = json.loads((tmp_path / "config.json").read_text())
    file = tmp_path / "model.safetensors"
    tensors = load_tensors(file)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int32)}, file)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight' of model_type 'granite' is packed"):
        load_checkpoint(tmp_path)
    packed = {f"{key}_packed" if key == name else key: value for key, value in tensors.items()}
    save_file(packed, file)
    with pytest.raises(CheckpointError, match=r"weight_packed' of model_type 'granite' is packed"):
        load_checkpoint(tmp_path)
    save_file({key.replace("model.layers", "transformer.h"): value for key, value in tensors.items()}, file)
    with pytest.raises(CheckpointError, match="has them in 0"):
        load_checkpoint(tmp_path)
    save_file(tensors, file)
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": None}))
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": ["granite"]}))
    with pytest.raises(CheckpointError, match=r"'model_type' is \['granite'\]"):
        load_checkpoint(tmp_path)


def test_layers_that_predict_several_tokens_and_experts_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "granite")
    file = tmp_path / "model.safetensors"
    plain = load_checkpoint(tmp_path).spec
    more = {
        "model.layers.0.mlp.experts.3.up_proj.weight": torch.zeros(8, 64),
        "model.layers.2.eh_proj.weight": torch.zeros(64, 128),
    }
    save_file(load_tensors(file) | more, file)
    assert load_checkpoint(tmp_path).spec.layers == plain.layers


def test_a_worker_serves_such_a_model(tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora", write(tmp_path / "model", "phi3"))
    section = vllm_section("fake") | {"worker": str(FAKE_WORKER)}
    served = Served("fake", tmp_path / "model", EngineConfig.model_validate({"vllm": section}))
    adapter = read_adapter(tmp_path / "lora", served.spec)
    answers = [served.tokens(served.submit((5, 6, 7), each)) for each in (None, adapter, adapter)]
    assert answers[0] != answers[1] == answers[2]
    assert served.engine.stop(60)
