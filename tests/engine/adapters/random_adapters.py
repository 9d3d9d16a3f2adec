"""Fresh random models and adapters for tests, in memory and as PEFT folders.

Shapes are small and unequal on purpose: a transposed or mixed-up matrix cannot pass unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from app.engine.adapters.adapter import LoraAdapter, LoraPair, TokenRows
from app.engine.adapters.adapter_builder import build_adapter
from app.engine.adapters.extra_weights import extra_bytes
from app.engine.adapters.modules import layer_modules
from app.engine.adapters.raw_adapter import RawAdapter, RawModule, RawTensor
from app.engine.models.linear_modules import DENSE_TARGETS, target_shape
from app.engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from app.engine.models.weight_names import expected_tensors
from tests import seeds

PATHS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
DTYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def tiny_spec(num_layers: int = 2, digest: str = "base") -> ModelSpec:
    """hidden 24, q 32 (4 heads of 8), k and v 16 (2 heads), feed-forward 40."""
    attention = AttentionSpec(4, 2, 8, 8**-0.5, RopeSpec((1.0, 0.1, 0.01, 0.001)))
    layer = LayerSpec(attention, MlpSpec(40))
    return ModelSpec("tiny", "llama", digest, 64, 24, 128, 1e-5, True, (layer,) * num_layers, 1, (2,))


def random_tensors(spec: ModelSpec, seed: int | None = None) -> list[tuple[str, np.ndarray]]:
    """Every tensor the spec implies; norms near one."""
    rng = np.random.default_rng(seeds.any_seed() if seed is None else seed)
    return [
        (name, (rng.standard_normal(shape) * 0.15 + (len(shape) == 1 and name.endswith("weight"))).astype(np.float32))
        for name, shape in expected_tensors(spec).items()
    ]


def module_path(layer: int, target: str) -> str:
    return f"model.layers.{layer}.{PATHS[target]}"


def stored_tensor(values: NDArray[Any], dtype: str = "F32") -> RawTensor:
    cast = np.ascontiguousarray(values.astype(DTYPES[dtype]))
    return RawTensor(dtype, cast.shape, memoryview(cast.tobytes()))


def adapter_from_arrays(
    arrays: Mapping[tuple[int, str], tuple[NDArray[np.float32], NDArray[np.float32]]],
    spec: ModelSpec,
    alpha: float | None = None,
    dtype: str = "F32",
) -> LoraAdapter:
    """From (layer, target) → (lora_A [r, d_in], lora_B [d_out, r]), saved in `dtype`; alpha None: a scale of 1."""
    modules = [
        RawModule(
            module_path(layer, target),
            stored_tensor(a, dtype),
            stored_tensor(b, dtype),
            float(a.shape[0]) if alpha is None else alpha,
            use_rslora=False,
        )
        for (layer, target), (a, b) in arrays.items()
    ]
    return build_adapter(RawAdapter(tuple(sorted(modules, key=lambda module: module.path))), spec)


def random_adapter(
    spec: ModelSpec,
    rank: int,
    targets: Iterable[str] = DENSE_TARGETS,
    seed: int | None = None,
    *,
    alpha: float | None = None,
    size: float = 0.2,
    dtype: str = "F32",
    saved_in: str = "F32",
) -> LoraAdapter:
    """Every layer's `targets` at one rank, values of `dtype`. `size` is the standard deviation of A and B."""
    arrays = random_arrays(spec, rank, targets, seed, size)
    stored = {
        key: (a.astype(DTYPES[dtype]).astype(np.float32), b.astype(DTYPES[dtype]).astype(np.float32))
        for key, (a, b) in arrays.items()
    }
    return adapter_from_arrays(stored, spec, alpha, saved_in)


def random_mixture_adapter(spec: ModelSpec, rank: int, rng: np.random.Generator, dtype: str = "F32") -> LoraAdapter:
    """Some of the modules of every kind, each expert's for itself, ranks up to `rank`, saved as `dtype`."""
    modules: list[RawModule] = []
    while not modules:  # an adapter of no module is refused
        for path, module in layer_modules(spec).items():
            if module.is_fused or rng.integers(2):
                continue
            d_in, d_outs = module.shape(spec)
            own = int(rng.integers(1, rank + 1))
            a, b = rng.normal(0, 0.3, (own, d_in)), rng.normal(0, 0.3, (sum(d_outs), own))
            pair = stored_tensor(a, dtype), stored_tensor(b, dtype)
            modules.append(RawModule(path, *pair, float(own), use_rslora=False))
    return build_adapter(RawAdapter(tuple(sorted(modules, key=lambda one: one.path))), spec)


def with_random_extras(adapter: LoraAdapter, spec: ModelSpec, rng: np.random.Generator) -> LoraAdapter:
    """`adapter` with some of what goes beyond plain LoRA, at least one thing, chosen at random."""

    def floats(*shape: int, centre: float = 0.0) -> NDArray[np.float32]:
        return (centre + rng.normal(0, 0.3, shape)).astype(np.float32)

    def some(keys: Iterable[Any]) -> list[Any]:
        return [key for key in keys if rng.integers(2)]

    hidden, vocab = spec.hidden_size, spec.vocab_size
    shapes = expected_tensors(spec) | {"lm_head.weight": (vocab, hidden)}
    names = [
        name for name in shapes if name.endswith((".bias", "norm.weight", "embed_tokens.weight", "lm_head.weight"))
    ]
    names = [name for name in names if not name.endswith("output_norm.weight")]  # Gemma's, which adapters do not bring
    linear = [f"{module_path(layer, target)}.weight" for layer in range(len(spec.layers)) for target in DENSE_TARGETS]
    linear = [name for name in linear if name in shapes]  # a layer with experts has no feed-forward of its own
    plain = [f"{module_path(key.layer, key.target)}.weight" for key in adapter.weights]
    ids = tuple(rng.permutation(vocab)[: int(rng.integers(1, 40))].tolist())
    parts = set(rng.permutation(["scaled", "shifted", "replaced", "outer", "rows"])[: int(rng.integers(1, 6))].tolist())
    replaced = [*some(names), *some(name for name in linear if name not in plain)] if "replaced" in parts else []
    outer = {
        "embed_tokens": LoraPair(floats(5, vocab), floats(5, hidden)),
        "lm_head": LoraPair(floats(19, hidden), floats(19, vocab)),
    }
    changed = replace(
        adapter,
        magnitudes={key: floats(adapter.weights[key].b.shape[1], centre=1) for key in some(adapter.weights)}
        if "scaled" in parts
        else {},
        delta_biases={key: floats(adapter.weights[key].b.shape[1]) for key in some(adapter.weights)}
        if "shifted" in parts
        else {},
        replaced={name: floats(*shapes[name], centre=float("norm" in name)) for name in replaced},
        outer={name: outer[name] for name in some(outer)} if "outer" in parts else {},
        token_rows={name: TokenRows(ids, floats(len(ids), hidden)) for name in some(outer)} if "rows" in parts else {},
    )
    digest = f"{adapter.card.digest} with {rng.integers(2**60)}"
    return replace(changed, card=replace(adapter.card, digest=digest, extra_bytes=extra_bytes(changed, spec)))


def random_arrays(
    spec: ModelSpec, rank: int, targets: Iterable[str] = DENSE_TARGETS, seed: int | None = None, size: float = 0.2
) -> dict[tuple[int, str], tuple[NDArray[np.float32], NDArray[np.float32]]]:
    rng = np.random.default_rng(seeds.any_seed() if seed is None else seed)
    arrays = {}
    for layer in range(len(spec.layers)):
        for target in targets:
            d_in, d_out = target_shape(spec, layer, target)
            a, b = rng.normal(0, size, (rank, d_in)), rng.normal(0, size, (d_out, rank))
            arrays[layer, target] = (a.astype(np.float32), b.astype(np.float32))
    return arrays


def peft_tensors(
    arrays: Mapping[tuple[int, str], tuple[NDArray[np.float32], NDArray[np.float32]]], dtype: str = "F32"
) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {}
    for (layer, target), (a, b) in arrays.items():
        tensors[f"base_model.model.{module_path(layer, target)}.lora_A.weight"] = a.astype(DTYPES[dtype])
        tensors[f"base_model.model.{module_path(layer, target)}.lora_B.weight"] = b.astype(DTYPES[dtype])
    return tensors


def peft_beyond(
    spec: ModelSpec, rank: int = 3, dtype: str = "F32", features: Iterable[str] = ("dora", "embedding", "saved", "rows")
) -> tuple[dict[str, object], dict[str, NDArray[Any]]]:
    """(configuration, tensors) of an adapter of q_proj with what PEFT can train beyond plain LoRA."""
    rng = seeds.rng()
    tensors = peft_tensors(random_arrays(spec, rank, ["q_proj"]), dtype)
    prefix = "base_model.model."
    hidden, vocab = spec.hidden_size, spec.vocab_size

    def add(name: str, *shape: int) -> None:
        tensors[prefix + name] = rng.normal(0, 0.2, shape).astype(DTYPES[dtype])

    targets, saved, config = ["q_proj"], [], peft_config(rank, ["q_proj"])
    for layer in range(len(spec.layers)):
        if "dora" in features:
            add(f"model.layers.{layer}.self_attn.q_proj.lora_magnitude_vector", target_shape(spec, layer, "q_proj")[1])
        if "lora_bias" in features:
            add(f"model.layers.{layer}.self_attn.q_proj.lora_B.bias", target_shape(spec, layer, "q_proj")[1])
    if "embedding" in features:
        config["rank_pattern"] = {"embed_tokens": 2}
        targets.append("embed_tokens")
        add("model.embed_tokens.lora_embedding_A", 2, vocab)
        add("model.embed_tokens.lora_embedding_B", hidden, 2)
    if "saved" in features:
        saved.append("model.norm")
        add("model.norm.weight", hidden)
    if "rows" in features:
        config["trainable_token_indices"] = {"lm_head": [7, 3]}
        add("lm_head.token_adapter.trainable_tokens_delta", 2, hidden)
    changes = {"use_dora": "dora" in features, "lora_bias": "lora_bias" in features, "modules_to_save": saved or None}
    return config | {"target_modules": targets} | changes, tensors


def peft_config(rank: int, targets: Iterable[str] = DENSE_TARGETS, **changes: object) -> dict[str, object]:
    """A configuration as PEFT 0.21 writes it for a plain adapter, with `block_events`."""
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": rank,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": list(targets),
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    } | changes


def write_peft(folder: Path, config: Mapping[str, object], tensors: Mapping[str, NDArray[Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder
