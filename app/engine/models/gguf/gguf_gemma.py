"""Gemma 2 and 3 in GGUF, where they depart from Llama.

Missing metadata takes llama.cpp's defaults. Norms are stored as the factor they multiply by (the converter adds 1), so
tensors need no change. Source: llama.cpp's converter and loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.engine.errors import CheckpointError
from app.engine.models.hf import gemma
from app.engine.models.spec import ModelSpec

#: Architecture -> transformers' model_type.
ARCHITECTURES = {"gemma2": "gemma2", "gemma3": "gemma3_text"}
_READ = """
    attention.sliding_window attention.sliding_window_pattern rope.freq_base_swa
    attn_logit_softcapping final_logit_softcapping
"""
#: These architectures' keys besides Llama's.
KEYS = frozenset(_READ.split())
#: Default period of layers with full attention.
_PATTERNS = {"gemma2": 2, "gemma3": 6}
#: llama.cpp recognises the 27B models by their number of layers: their scores are scaled as if heads had
#: hidden_size / num_heads numbers.
_NUM_LAYERS_27B = {"gemma2": 46, "gemma3": 62}
#: Ends a turn of the instruction-tuned models; their files name only <eos>, which these models do not emit.
_END_OF_TURN = "<end_of_turn>"


def adjust_spec(spec: ModelSpec, architecture: str, keys: Mapping[str, Any]) -> ModelSpec:
    """Add what only Gemma has to a spec that was read with Llama's keys. Raises CheckpointError."""
    if keys.get("attention.sliding_window") is None:
        raise CheckpointError(f"GGUF key '{architecture}.attention.sliding_window' is missing; Gemma's layers have one")
    pattern = keys.get("attention.sliding_window_pattern", _PATTERNS[architecture])
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


def end_of_turn(metadata: Mapping[str, Any]) -> int | None:
    """The token that ends a turn, if the file has a chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if metadata.get("tokenizer.chat_template") is None or not isinstance(tokens, list) or _END_OF_TURN not in tokens:
        return None
    return tokens.index(_END_OF_TURN)
