"""Reads an encoder's `config.json` (BERT, RoBERTa), of any transformers version, into a `ModelSpec`, and its pooling.

As for decoders, every key is read, on the list of inert ones, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.engine.errors import CheckpointError
from app.engine.models.hf.config import INERT_KEYS
from app.engine.models.hf.config_values import norm_eps, positive
from app.engine.models.hf.safetensors_folder import read_json
from app.engine.models.spec import (
    AttentionSpec,
    EncoderSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    Pooling,
    RopeSpec,
    checked_head_dim,
    checked_num_layers,
)

#: Family -> whether positions begin at pad_token_id + 1 instead of 0.
_KINDS = {"bert": False, "roberta": True, "xlm-roberta": True, "camembert": True}
_READ = """
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act
    max_position_embeddings layer_norm_eps type_vocab_size pad_token_id
"""
_INERT_HERE = """
    attention_probs_dropout_prob hidden_dropout_prob classifier_dropout gradient_checkpointing bos_token_id eos_token_id
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    output_past tie_word_embeddings
"""
_FIXED: dict[str, tuple[object, ...]] = {
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
    "position_embedding_type": ("absolute",),
    "embedding_size": (None,),
}
#: sentence-transformers' pooling configuration, and the modes that are supported.
_POOLING_CONFIG = Path("1_Pooling", "config.json")
_POOLING_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether this configuration is for `encoder_spec`."""
    return str(config.get("model_type")) in _KINDS and not config.get("is_decoder")


def encoder_spec(config: Mapping[str, Any], name: str, digest: str, pooling: Pooling) -> ModelSpec:
    """Read `config.json`. Raises CheckpointError."""
    _check_keys(config)
    hidden_size, num_heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    if config.get("hidden_act", "gelu") != "gelu":
        raise CheckpointError(f"hidden_act {config['hidden_act']!r} is not supported for encoders; only 'gelu' is")
    head_dim = checked_head_dim(hidden_size // num_heads)
    pad = config.get("pad_token_id")
    first = (1 if pad is None else int(pad)) + 1 if _KINDS[config["model_type"]] else 0
    num_positions = positive(config, "max_position_embeddings", 512)
    if num_positions <= first:
        raise CheckpointError(f"max_position_embeddings is {num_positions}, but positions begin at {first}")
    attention = AttentionSpec(num_heads, num_heads, head_dim, head_dim**-0.5, RopeSpec(()), qkv_bias=True, o_bias=True)
    mlp = MlpSpec(positive(config, "intermediate_size"), "gelu", bias=True)
    return ModelSpec(
        name=name,
        family=str(config["model_type"]),
        digest=digest,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        max_positions=num_positions - first,
        norm_eps=norm_eps(config, "layer_norm_eps", 1e-12),
        tie_embeddings=False,
        layers=(LayerSpec(attention, mlp),) * checked_num_layers(positive(config, "num_hidden_layers")),
        bos_token_id=None,
        eos_token_ids=(),
        pooling=pooling,
        encoder=EncoderSpec(num_positions, first, positive(config, "type_vocab_size", 2)),
    )


def folder_pooling(folder: Path) -> Pooling | None:
    """The pooling that a sentence-transformers folder asks for; None without such a file. Raises CheckpointError.

    Embeddings always have length 1, so a Normalize module makes no difference.
    """
    if not (folder / _POOLING_CONFIG).is_file():
        return None
    config = read_json(folder / _POOLING_CONFIG)
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _POOLING_MODES:
        raise CheckpointError(
            f"{_POOLING_CONFIG} asks for {' and '.join(chosen) or 'no pooling'}; one of {', '.join(_POOLING_MODES)} "
            "is served"
        )
    if config.get("include_prompt") is False:
        raise CheckpointError(f"{_POOLING_CONFIG} leaves prompts out of the pooling, which is not served")
    return _POOLING_MODES[chosen[0]]


def _check_keys(config: Mapping[str, Any]) -> None:
    known = {*_READ.split(), *INERT_KEYS.split(), *_INERT_HERE.split()}
    for key, value in config.items():
        if key in _FIXED:
            if value not in _FIXED[key]:
                raise CheckpointError(f"config key {key!r} is {value!r}; only {_FIXED[key][0]!r} is supported")
        elif value is not None and key not in known:
            raise CheckpointError(
                f"config key {key!r} ({value!r}) is not understood for model_type {config['model_type']!r}"
            )
