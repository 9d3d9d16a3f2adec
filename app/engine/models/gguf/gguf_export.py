"""Writes a GGUF model as a Hugging Face folder that transformers can load.

GGUF's quantisation has no equivalent there, so weights are float32. What is written reads back as the same `ModelSpec`;
a file whose properties no `config.json` of its family can express is a CheckpointError that names the property.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.errors import CheckpointError
from app.engine.models.gguf.gguf_file import GgufFile, read_gguf
from app.engine.models.hf import gemma
from app.engine.models.hf.config import spec_from_config
from app.engine.models.spec import ModelSpec
from app.engine.models.tokenizers.tokenizer import load_tokenizer

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
#: GGUF stores only the divisors of Llama 3's scaling. All published models share these values and differ in `factor`.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def folder_files(path: Path, spec: ModelSpec) -> dict[str, str]:
    """File name -> text of everything in the folder except the weights; with the tokenizer if the file has one.

    Raises CheckpointError.
    """
    file = read_gguf(path)
    if spec.family not in _ARCHITECTURES:
        raise CheckpointError(
            f"'{path.name}' is a GGUF file of the family {spec.family!r}, which cannot be written as a Hugging Face "
            f"folder; that can {', '.join(_ARCHITECTURES)}. Name the model's own folder as the base"
        )
    config = _config(file, spec)
    _check(config, spec, path)
    stops = {"bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids) or None}
    files = {"config.json": config | stops, "generation_config.json": stops}
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}
    return texts | (_tokenizer_files(path) if "tokenizer.ggml.model" in file.metadata else {})


def folder_tensors(
    tensors: Iterator[tuple[str, NDArray[Any]]], spec: ModelSpec
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Tensors of canonical names as the folder has them, in float32."""
    named = gemma.stored_tensors(tensors) if spec.family in gemma.FAMILIES else tensors
    return ((name, np.ascontiguousarray(values, np.float32)) for name, values in named)


def _config(file: GgufFile, spec: ModelSpec) -> dict[str, Any]:
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "dtype": "float32",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "rope_parameters": _rope_parameters(file),
    }
    if spec.family in gemma.FAMILIES:
        return config | _gemma(file, spec)
    if spec.family == "llama":
        config |= {"mlp_bias": mlp.bias}
    if spec.family != "qwen2":
        config |= {"attention_bias": attention.qkv_bias}
    return config | {"hidden_act": mlp.activation}


def _rope_parameters(file: GgufFile) -> dict[str, Any]:
    """Rope parameters of the layers with full attention."""
    prefix = f"{file.metadata['general.architecture']}.rope."
    kind = file.metadata.get(f"{prefix}scaling.type", "none")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": file.metadata.get(f"{prefix}freq_base", 10_000.0)}
    if kind != "none":
        found |= {"rope_type": kind, "factor": file.metadata.get(f"{prefix}scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = file.metadata.get(f"{prefix}scaling.original_context_length")
    if "rope_freqs.weight" in file.tensors:
        factor = float(file.dequantize("rope_freqs.weight").max())
        found |= {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return found


def _gemma(file: GgufFile, spec: ModelSpec) -> dict[str, Any]:
    windows = [layer.attention.window for layer in spec.layers]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(spec.layers[0].attention.scale ** -2),
        "sliding_window": next((window for window in windows if window is not None), spec.max_positions),
        "layer_types": kinds,
        "final_logit_softcapping": spec.logit_softcap,
        "attn_logit_softcapping": spec.layers[0].attention.softcap,
    }
    if spec.family == "gemma3_text":
        theta = file.metadata.get("gemma3.rope.freq_base_swa", 10_000.0)
        local = {"rope_type": "default", "rope_theta": theta}
        config["rope_parameters"] = {"full_attention": _rope_parameters(file), "sliding_attention": local}
    return config


def _check(config: dict[str, Any], spec: ModelSpec, path: Path) -> None:
    """CheckpointError names the first property of the model that the configuration does not express."""
    written = spec_from_config(config, spec.name, spec.digest)
    written = replace(written, bos_token_id=spec.bos_token_id, eos_token_ids=spec.eos_token_ids)
    found, expected = _flat(asdict(written)), _flat(asdict(spec))
    for key in expected:
        if key not in found or not _equal(found[key], expected[key]):
            raise CheckpointError(
                f"'{path.name}' has {key} {expected[key]}, which no {spec.family!r} config.json can express "
                f"(it would be {found.get(key)}); name the model's own folder as the base"
            )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf value, by its path."""
    if not isinstance(value, dict | tuple) or not value:
        return {prefix: value}
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    return {path: leaf for key, one in entries for path, leaf in _flat(one, f"{prefix}.{key}".lstrip(".")).items()}


def _equal(found: Any, expected: Any) -> bool:
    """Floats may differ in their last bits, because frequencies were divided twice."""
    if isinstance(found, float) and isinstance(expected, float):
        return abs(found - expected) <= 1e-6 * abs(expected)
    return bool(found == expected)


def _tokenizer_files(path: Path) -> dict[str, str]:
    tokenizer = load_tokenizer(path)
    # The class that uses tokenizer.json unchanged; others would rebuild parts of it.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(config | tokenizer.special_tokens, indent=2) + "\n",
    }
    return files if tokenizer.chat_template is None else files | {"chat_template.jinja": tokenizer.chat_template}
