"""Gemma 2 and 3 in GGUF, where they depart from Llama: the architecture's metadata in the words of `config.json`.

In: the keys of the architecture's namespace and the `ModelSpec` read in Llama's words. Out: the `ModelSpec` with what
is Gemma's own. What a file leaves out has the value that llama.cpp gives it. Norms are stored as what they multiply by
(the converter adds 1 to each weight), so tensors are taken as they are. Source: llama.cpp's converter and loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.engine.errors import CheckpointError
from app.engine.models.hf import gemma
from app.engine.models.spec import ModelSpec

#: Architecture -> what transformers calls it.
ARCHITECTURES = {"gemma2": "gemma2", "gemma3": "gemma3_text"}
_READ = """
    attention.sliding_window attention.sliding_window_pattern rope.freq_base_swa
    attn_logit_softcapping final_logit_softcapping
"""
#: Keys of these architectures, beside Llama's.
KEYS = frozenset(_READ.split())
#: Every so many layers one sees everything, where the file does not say.
_PATTERNS = {"gemma2": 2, "gemma3": 6}
#: llama.cpp tells the models of 27 billion weights by their layers: their scores are scaled as if heads had
#: hidden_size / num_heads numbers.
_NUM_LAYERS_27B = {"gemma2": 46, "gemma3": 62}
#: Ends a turn of the instructed models; their files name only <eos>, which they do not say.
_END_OF_TURN = "<end_of_turn>"


def adjust_spec(spec: ModelSpec, architecture: str, keys: Mapping[str, Any]) -> ModelSpec:
    """What was read in Llama's words, with what is Gemma's own. Raises CheckpointError."""
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
    """The token that ends a turn, of files with a chat template; None of others."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if metadata.get("tokenizer.chat_template") is None or not isinstance(tokens, list) or _END_OF_TURN not in tokens:
        return None
    return tokens.index(_END_OF_TURN)
