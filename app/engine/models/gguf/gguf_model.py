"""Interprets a GGUF file: metadata to `ModelSpec`, tensors to canonical names, layout and float32.

Architectures: llama (including Mistral and Mixtral, which GGUF stores as llama), qwen2, qwen3, gemma2, gemma3, and the
mixtures qwen2moe, qwen3moe, olmoe, deepseek2 and gpt-oss. Every key of the architecture's namespace is read, must have
a fixed value, or is refused by name. For llama, the converter interleaves the rows of q and k (adjacent pairs are
rotated); they are reordered to the half-split order that every backend rotates. Gemma's norms are stored as the factor
they multiply by (the converter adds 1) and need no change. Missing metadata takes llama.cpp's defaults. Source:
llama.cpp's converter and loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import CheckpointError
from app.engine.models.gguf import gguf_moe
from app.engine.models.gguf.gguf_file import GgufFile
from app.engine.models.hf import gemma
from app.engine.models.hf.config import spec_from_config
from app.engine.models.moe_weight_layouts import canonical_shapes, canonical_tensors
from app.engine.models.rope import rope_spec
from app.engine.models.spec import (
    MAX_EXPERTS,
    MAX_SIZE,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    SharedExpertSpec,
    checked_head_dim,
    checked_num_layers,
)
from app.engine.models.weight_names import canonical_gguf_name

#: Gemma's architectures -> transformers' model_type.
_GEMMA_ARCHITECTURES = {"gemma2": "gemma2", "gemma3": "gemma3_text"}
_GEMMA_READ = """
    attention.sliding_window attention.sliding_window_pattern rope.freq_base_swa
    attn_logit_softcapping final_logit_softcapping
"""
#: These architectures' keys besides Llama's.
_GEMMA_KEYS = frozenset(_GEMMA_READ.split())
#: Default period of layers with full attention.
_GEMMA_PATTERNS = {"gemma2": 2, "gemma3": 6}
#: llama.cpp recognises the 27B models by their number of layers: their scores are scaled as if heads had
#: hidden_size / num_heads numbers.
_NUM_LAYERS_27B = {"gemma2": 46, "gemma3": 62}
#: Ends a turn of the instruction-tuned models; their files name only <eos>, which these models do not emit.
_END_OF_TURN = "<end_of_turn>"
#: Architecture -> transformers' model_type.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    **_GEMMA_ARCHITECTURES,
    **gguf_moe.ARCHITECTURES,
}
#: Architectures with experts -> whether llama.cpp normalises their router weights.
_NORMALISES = {"llama": True, "qwen3moe": True, "qwen2moe": False, "olmoe": False}
_INTERLEAVED = ("llama", "mixtral")
_ROPE_FACTORS = "rope_freqs.weight"
_READ = """
    block_count context_length embedding_length feed_forward_length attention.head_count attention.head_count_kv
    attention.key_length attention.value_length attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count
    rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned vocab_size
    expert_count expert_used_count expert_feed_forward_length expert_shared_feed_forward_length
"""
_FIXED: dict[str, tuple[object, ...]] = {
    "expert_gating_func": (1,),  # a softmax over all
    "expert_weights_scale": (1.0, 0.0),
    "expert_group_count": (0, 1),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1.0,),
    "pooling_type": (0,),
}


def spec_from_gguf(file: GgufFile, name: str, digest: str) -> ModelSpec:
    """Read the metadata; biases, q/k norms and tied embeddings follow from the tensors present."""
    architecture = _architecture(file)
    is_gemma = architecture in _GEMMA_ARCHITECTURES
    keys = _namespace(file, architecture)
    if architecture in gguf_moe.ARCHITECTURES:
        return _spec_from_hf_config(file, architecture, keys, name, digest)
    hidden_size, num_heads = _integer(keys, "embedding_length"), _integer(keys, "attention.head_count")
    num_kv_heads = _integer(keys, "attention.head_count_kv", num_heads)
    head_dim = checked_head_dim(_integer(keys, "attention.key_length", hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise CheckpointError(f"attention.head_count {num_heads} is not a multiple of head_count_kv {num_kv_heads}")
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(keys, key, head_dim) != head_dim:
            raise CheckpointError(f"{key} is {keys[key]} but heads are {head_dim} wide; they must be equal")
    max_positions = _integer(keys, "context_length")
    names = {canonical_gguf_name(tensor) for tensor in file.tensors}
    first = "model.layers.0."
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_rope(file, keys, head_dim, max_positions),
        qkv_bias=f"{first}self_attn.q_proj.bias" in names,
        o_bias=f"{first}self_attn.o_proj.bias" in names,
        qk_norm=f"{first}self_attn.q_norm.weight" in names,
        whole_qk_norm=architecture == "olmoe",
    )
    has_bias = f"{first}mlp.gate_proj.bias" in names
    mlp = MlpSpec(_integer(keys, "feed_forward_length"), "gelu_tanh" if is_gemma else "silu", has_bias)
    experts = _experts(keys, architecture)
    if experts is not None:
        mlp = MlpSpec(_integer(keys, "expert_feed_forward_length", mlp.intermediate_size))
    vocab_size = _vocab_size(file, keys)
    end_ids = _end_ids(file, vocab_size)
    if is_gemma and (end_of_turn := _end_of_turn(file.metadata)) is not None:
        end_ids.append(end_of_turn)
    spec = ModelSpec(
        name=name,
        family="mixtral" if architecture == "llama" and experts is not None else ARCHITECTURES[architecture],
        digest=digest,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_positions=max_positions,
        norm_eps=_positive(keys, "attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in file.tensors,
        layers=(LayerSpec(attention, mlp, experts),) * checked_num_layers(_integer(keys, "block_count")),
        bos_token_id=_token_id(file, "bos", vocab_size),
        eos_token_ids=tuple(dict.fromkeys(end_ids)),
    )
    return _adjust_gemma_spec(spec, architecture, keys) if is_gemma else spec


def _spec_from_hf_config(file: GgufFile, architecture: str, keys: dict[str, Any], name: str, digest: str) -> ModelSpec:
    config = gguf_moe.hf_config_from_gguf(architecture, keys, lambda tensor: f"blk.0.{tensor}.bias" in file.tensors)
    vocab_size = _vocab_size(file, keys)
    config |= {
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token_id(file, "bos", vocab_size),
        "eos_token_id": _end_ids(file, vocab_size),
    }
    return spec_from_config(config, name, digest)


def _adjust_gemma_spec(spec: ModelSpec, architecture: str, keys: Mapping[str, Any]) -> ModelSpec:
    """Add what only Gemma has to a spec that was read with Llama's keys. Raises CheckpointError."""
    if keys.get("attention.sliding_window") is None:
        raise CheckpointError(f"GGUF key '{architecture}.attention.sliding_window' is missing; Gemma's layers have one")
    pattern = keys.get("attention.sliding_window_pattern", _GEMMA_PATTERNS[architecture])
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise CheckpointError(
            f"GGUF key '{architecture}.attention.sliding_window_pattern' is {pattern!r}; a positive integer is needed"
        )
    attention = spec.layers[0].attention
    query_width = attention.head_dim
    if len(spec.layers) == _NUM_LAYERS_27B[architecture]:
        query_width = spec.hidden_size // attention.num_heads
    config: dict[str, Any] = {
        "model_type": spec.family,
        "query_pre_attn_scalar": query_width,
        "sliding_window": keys["attention.sliding_window"],
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0 if architecture == "gemma2" else None),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0 if architecture == "gemma2" else None),
    }
    return gemma.adjust_spec(spec, config)


def _end_of_turn(metadata: Mapping[str, Any]) -> int | None:
    """The token that ends a turn, if the file has a chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if metadata.get("tokenizer.chat_template") is None or not isinstance(tokens, list) or _END_OF_TURN not in tokens:
        return None
    return tokens.index(_END_OF_TURN)


def gguf_shapes(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape; a tensor without a canonical name keeps its own and is refused later."""
    own = {name: tensor.shape for name, tensor in file.tensors.items() if name != _ROPE_FACTORS}
    names = _names(file)
    found = {canonical_gguf_name(name, names) or name: _whole_shape(name, shape) for name, shape in own.items()}
    return canonical_shapes(gguf_moe.whole_shapes(found))


def _names(file: GgufFile) -> Mapping[str, str]:
    """Tensor names within a layer that only this architecture has."""
    return gguf_moe.LAYER_NAMES.get(_architecture(file), {})


def _architecture(file: GgufFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"GGUF architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return str(architecture)


def _whole_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shared expert's gate is a vector in GGUF and a matrix of one row elsewhere."""
    return (1, *shape) if ".ffn_gate_inp_shexp." in name and len(shape) == 1 else shape


def _experts(keys: dict[str, Any], architecture: str) -> ExpertsSpec | None:
    """Every layer's experts, or None for a dense model."""
    if keys.get("expert_count", 0) == 0 and (architecture not in _NORMALISES or architecture == "llama"):
        return None
    if architecture not in _NORMALISES:
        raise CheckpointError(f"GGUF architecture {architecture!r} with experts is not supported")
    count, top_k = _integer(keys, "expert_count"), _integer(keys, "expert_used_count")
    if not top_k <= count <= MAX_EXPERTS:
        raise CheckpointError(f"expert_used_count is {top_k} of {count} experts; at most all of {MAX_EXPERTS} are read")
    shared = None
    if architecture == "qwen2moe":
        wide = _integer(keys, "expert_shared_feed_forward_length")
        shared = SharedExpertSpec("shared_expert", MlpSpec(wide), is_gated=True)
    return ExpertsSpec(RouterSpec(count, top_k, _NORMALISES[architecture]), shared)


def gguf_tensors(file: GgufFile, spec: ModelSpec) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor under its canonical name, in float32 and half-split order, one (or a layer's experts) at a time."""
    return canonical_tensors(gguf_moe.whole_tensors(_whole_tensors(file, spec)))


def _whole_tensors(file: GgufFile, spec: ModelSpec) -> Iterator[tuple[str, NDArray[np.float32]]]:
    names = _names(file)
    for name in file.tensors:
        canonical = canonical_gguf_name(name, names)
        if canonical is None:
            continue  # rope_freqs, already in the spec; anything else was refused
        values = file.dequantize(name)
        values = values.reshape(_whole_shape(name, values.shape))
        if spec.family in _INTERLEAVED and ".attn_q." in name:
            values = _half_split_rows(values, spec.layers[0].attention.num_heads)
        elif spec.family in _INTERLEAVED and ".attn_k." in name:
            values = _half_split_rows(values, spec.layers[0].attention.num_kv_heads)
        yield canonical, values


def _half_split_rows(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the converter's interleaving of each head's rows: pairs (0,1),(2,3),… back to (0,d/2),(1,d/2+1),…"""
    pairs = values.shape[0] // num_heads // 2
    split = values.reshape(num_heads, pairs, 2, *values.shape[1:]).swapaxes(1, 2)  # [heads, 2, pairs, …]
    return np.ascontiguousarray(split).reshape(values.shape)


def _namespace(file: GgufFile, architecture: str) -> dict[str, Any]:
    prefix = architecture + "."
    keys = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    own = _GEMMA_KEYS if architecture in _GEMMA_ARCHITECTURES else gguf_moe.KEYS.get(architecture, ())
    fixed = {**_FIXED, **gguf_moe.FIXED.get(architecture, {})}
    for key, value in keys.items():
        if key in own:
            continue
        if key in fixed and value not in fixed[key]:
            raise CheckpointError(f"GGUF key {prefix + key!r} is {value!r}; only {fixed[key][0]!r} is supported")
        if key not in _READ.split() and key not in fixed:
            raise CheckpointError(f"GGUF key {prefix + key!r} ({value!r}) is not understood")
    return keys


def _rope(file: GgufFile, keys: dict[str, Any], head_dim: int, max_positions: int) -> RopeSpec:
    kind = keys.get("rope.scaling.type", "none")
    parameters: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": _positive(keys, "rope.freq_base", 10_000.0),
    }
    if kind in ("linear", "yarn"):
        parameters["factor"] = keys.get("rope.scaling.factor")
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = keys.get("rope.scaling.original_context_length")
    rope = rope_spec(parameters, head_dim, max_positions)
    if _ROPE_FACTORS not in file.tensors:
        return rope
    # llama3 scaling: the converter stores each frequency's divisor.
    divisors = file.dequantize(_ROPE_FACTORS)
    if divisors.shape != (head_dim // 2,) or kind != "none":
        raise CheckpointError(f"{_ROPE_FACTORS} of shape {list(divisors.shape)} does not fit rope scaling {kind!r}")
    return replace(rope, inv_freq=tuple(float(f) for f in np.asarray(rope.inv_freq, dtype=np.float32) / divisors))


def _vocab_size(file: GgufFile, keys: dict[str, Any]) -> int:
    embedding = file.tensors.get("token_embd.weight")
    return _integer(keys, "vocab_size", embedding.shape[0] if embedding is not None else None)


def _end_ids(file: GgufFile, vocab_size: int) -> list[int]:
    found = [_token_id(file, key, vocab_size) for key in ("eos", "eot", "eom")]
    return [token_id for token_id in found if token_id is not None]


def _token_id(file: GgufFile, which: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    value = file.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise CheckpointError(f"GGUF key {key!r} is {value!r}; a token id, from 0 and below {vocab_size}, is needed")
    return value


def _integer(keys: dict[str, Any], key: str, default: int | None = None) -> int:
    value = keys.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise CheckpointError(f"GGUF key {key!r} is {value!r}; a positive integer up to {MAX_SIZE} is needed")
    return value


def _positive(keys: dict[str, Any], key: str, default: float | None = None) -> float:
    value = keys.get(key, default)
    if not isinstance(value, float) or not value > 0:
        raise CheckpointError(f"GGUF key {key!r} is {value!r}; a positive number is needed")
    return value
