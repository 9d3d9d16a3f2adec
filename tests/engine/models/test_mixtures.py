"""Configurations and checkpoints of mixtures of experts: what is read, in which layouts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from app.engine.errors import CheckpointError
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.hf import gpt_oss
from app.engine.models.hf.config import spec_from_config
from app.engine.models.linear_modules import layer_linear_modules, stacked_modules, targets_of
from app.engine.models.memory_estimate import kv_block_bytes
from app.engine.models.spec import ExpertsSpec, LatentSpec, MlpSpec, ModelSpec, RouterSpec, SharedExpertSpec
from tests.engine.checkpoints import MIXTURES, save, tiny_model
from tests.seeds import any_seed

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV2Model"},
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def _spec(model_type: str, **settings: Any) -> ModelSpec:
    return spec_from_config(_COMMON | {"model_type": model_type} | settings, "m", "d")


def test_qwen2_moe_has_experts_in_some_layers_beside_a_gated_shared_one() -> None:
    spec = _spec(
        "qwen2_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=28, mlp_only_layers=[3],
        shared_expert_intermediate_size=52, decoder_sparse_step=2, num_key_value_heads=2,
    )  # fmt: skip
    assert [layer.experts is not None for layer in spec.layers] == [False, True, False, False]
    assert [layer.mlp.intermediate_size for layer in spec.layers] == [72, 28, 72, 72]
    mixture = spec.layers[1].experts
    assert mixture is not None
    assert mixture.router == RouterSpec(8, 3, normalised=False)
    assert mixture.shared is not None
    assert (mixture.shared.name, mixture.shared.mlp.intermediate_size, mixture.shared.is_gated) == (
        "shared_expert", 52, True,
    )  # fmt: skip
    assert spec.layers[1].attention.qkv_bias
    names = {product.name: layers for product, layers in stacked_modules(spec)}
    assert names["gate_up"] == names["down"] == (0, 2, 3)
    assert names["experts_gate_up"] == names["shared_gate"] == names["router"] == (1,)
    assert "experts.up_proj" in targets_of(product for product, _ in stacked_modules(spec))


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe"])
def test_how_many_experts_there_are_goes_by_two_names(model_type: str, key: str) -> None:
    settings = {"moe_intermediate_size": 28} if model_type == "qwen3_moe" else {}
    spec = _spec(model_type, num_key_value_heads=2, num_experts_per_tok=2, **{key: 6}, **settings)
    assert all(
        layer.experts == ExpertsSpec(RouterSpec(6, 2, normalised=model_type == "mixtral")) for layer in spec.layers
    )


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts": 5}, "two different numbers of experts"),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 2}, "num_experts_per_tok is 2 but"),
        ("mixtral", {"num_local_experts": 9999}, "a layer 9999 experts; at most 4096"),
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts.*positive integer"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers.*list"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob.*true or false"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("qwen2_moe", {"n_group": 2}, "n_group"),
        ("deepseek_v2", {"num_key_value_heads": 4}, "num_experts_per_tok.*positive integer"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "num_key_value_heads": 2}, "latents make keys for all 4 heads"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "num_key_value_heads": 4, "v_head_dim": 20}, "v_head_dim.*of 16"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "num_key_value_heads": 4, "norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "num_key_value_heads": 4, "topk_method": "noaux_tc"}, "noaux_tc"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "num_key_value_heads": 4, "mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "num_key_value_heads": 4, "qk_head_dim": 7}, "qk_head_dim is 7"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": 48}, "head_dim is 48"),
        ("deepseek_v3", {}, "'deepseek_v3' is not among the supported families"),
        ("gpt_oss", {"experts_per_token": 9}, "experts_per_token is 9"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit.*positive number"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'; only 'mxfp4'"),
    ],
)
def test_what_changes_the_arithmetic_and_is_not_honoured_is_refused(
    model_type: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        _spec(model_type, **{"num_key_value_heads": 2, **settings})


def test_deepseeks_published_lite_configuration_is_read() -> None:
    spec = spec_from_config(DEEPSEEK_V2_LITE, "m", "d")
    attention = spec.layers[5].attention
    assert attention.latent == LatentSpec(512, 128, 64, 128, None, 1e-6)
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * np.log(40) + 1) ** 2)
    assert [layer.experts is None for layer in spec.layers] == [True] + [False] * 26
    assert spec.layers[1].experts == ExpertsSpec(
        RouterSpec(64, 6, normalised=False), SharedExpertSpec("shared_experts", MlpSpec(2816), is_gated=False)
    )
    assert kv_block_bytes(spec, 1, 4) == 27 * (512 + 64) * 4
    assert not any(product.has_rank_rows for product in layer_linear_modules(spec, 1) if product.name == "latent_b")


def test_mxfp4_blocks_are_read_as_transformers_reads_them() -> None:
    generator = np.random.default_rng(any_seed())
    blocks = generator.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = generator.integers(110, 140, (2, 6, 3), dtype=np.uint8)
    expected = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    path = "model.layers.0.mlp.experts"
    stored = {f"{path}.gate_up_proj_scales": scales, f"{path}.gate_up_proj_blocks": blocks}
    shapes = gpt_oss.canonical_shapes({name: values.shape for name, values in stored.items()})
    found = dict(gpt_oss.canonical_tensors(stored.items()))
    assert {name: values.shape for name, values in found.items()} == shapes
    for expert in range(2):  # transformers': [experts, in, out], gate and up in turn
        for n, module in enumerate(("gate_proj", "up_proj")):
            assert np.array_equal(found[f"{path}.{expert}.{module}.weight"], expected[expert, :, n::2].T.numpy())


def test_a_quantised_gpt_oss_folder_is_the_same_model_as_its_plain_one(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss", hidden_size=64, intermediate_size=32)
    folder = save(model, tmp_path / "model")
    generator = np.random.default_rng(any_seed())

    def quantise(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            count, d_in, d_out = tensors.pop(name).shape
            blocks = generator.integers(0, 256, (count, d_out, d_in // 32, 16), dtype=np.uint8)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = generator.integers(120, 126, blocks.shape[:3], dtype=np.uint8)

    _edit(folder, quantise)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    tensors = dict(load_checkpoint(folder).tensors())
    assert tensors["model.layers.2.mlp.experts.5.up_proj.weight"].shape == (32, 64)
    _edit(folder, lambda held: held.pop("model.layers.1.mlp.experts.down_proj_scales"))
    with pytest.raises(CheckpointError, match=r"down_proj_blocks.*its scales are None"):
        load_checkpoint(folder)


def test_a_shared_expert_of_another_activation_is_another_model() -> None:
    spec = _spec("qwen2_moe", num_key_value_heads=2)
    mixture = spec.layers[0].experts
    assert mixture is not None
    assert isinstance(mixture.shared, SharedExpertSpec)
    assert mixture.shared.mlp.activation == spec.layers[0].mlp.activation


def _edit(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _fuse(tensors: dict[str, np.ndarray]) -> None:
    """From one tensor per expert to one per layer."""
    for layer in {int(name.split(".")[2]) for name in tensors if ".experts." in name}:
        prefix = f"model.layers.{layer}.mlp.experts"
        count = len([name for name in tensors if name.startswith(prefix) and "down_proj" in name])

        def take(module: str, prefix: str = prefix, count: int = count) -> np.ndarray:
            return np.stack([tensors.pop(f"{prefix}.{expert}.{module}.weight") for expert in range(count)])

        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([take("gate_proj"), take("up_proj")], axis=1)
        tensors[f"{prefix}.down_proj"] = take("down_proj")


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe"])
def test_fused_and_single_experts_are_the_same_model(family: str, tmp_path: Path) -> None:
    folder = save(tiny_model(family), tmp_path / "model")
    single = dict(load_checkpoint(folder).tensors())
    _edit(folder, _fuse)
    fused = dict(load_checkpoint(folder).tensors())
    assert set(fused) == set(single)
    assert all(np.array_equal(fused[name], single[name]) for name in single)


def test_mixtrals_older_names_are_read(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    folder = save(model, tmp_path / "model")
    assert any(".block_sparse_moe.experts.0.w3." in name for name in load_file(folder / "model.safetensors"))
    tensors = dict(load_checkpoint(folder).tensors())
    parameters = dict(model.named_parameters())
    both = parameters["model.layers.1.mlp.experts.gate_up_proj"][3].detach().numpy()
    assert np.array_equal(tensors["model.layers.1.mlp.experts.3.up_proj.weight"], both[72:])
    assert np.array_equal(tensors["model.layers.1.mlp.experts.3.gate_proj.weight"], both[:72])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.down_proj"), r"lacks 'model\.layers\.1\.mlp\.experts\.0\.down"),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.0.down_proj.weight": np.zeros((40, 72), np.float32)}),
            r"'model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight' is stored twice",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.down_proj": np.zeros((9, 40, 72), np.float32)}),
            r"does not imply: 'model\.layers\.1\.mlp\.experts\.6\.",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((6, 143, 40), np.float32)}),
            r"shape \[6, 143, 40\]; \[experts, outputs, inputs\] is needed",
        ),
    ],
)
def test_a_checkpoint_whose_experts_do_not_fit_is_refused(
    change: Callable[[dict[str, np.ndarray]], None], message: str, tmp_path: Path
) -> None:
    folder = save(tiny_model("olmoe"), tmp_path / "model")
    _edit(folder, _fuse)
    _edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_every_family_is_in_the_documents() -> None:
    text = Path("docs/reference/models.md").read_text()
    types = {json.dumps(MIXTURES[family][0]) for family in MIXTURES}
    assert len(types) == 6
    for name in ("Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "DeepSeek-V2", "gpt-oss"):
        assert name in text
