"""Names and shapes of an encoder's tensors, as in transformers' BertModel.

Checkpoints with task heads have them under a prefix, and other tensors that no embedding depends on.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import ModelSpec

LAYERS = "encoder.layer"
WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
POSITION_EMBEDDINGS = "embeddings.position_embeddings.weight"
TOKEN_TYPE_EMBEDDINGS = "embeddings.token_type_embeddings.weight"
#: Prefixes of a norm's weight and bias: for the input, after attention, after the feed-forward.
INPUT_NORM = "embeddings.LayerNorm"
ATTENTION_NORM = "attention.output.LayerNorm"
MLP_NORM = "output.LayerNorm"

_PREFIXES = ("bert.", "roberta.")
#: Parts of a checkpoint that hidden states do not depend on.
_UNREAD = ("pooler.", "cls.", "lm_head.", "classifier.", "embeddings.position_ids")


def encoder_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the spec implies; a weight is [d_out, d_in]."""
    encoder, hidden = spec.encoder, spec.hidden_size
    assert encoder is not None
    shapes: dict[str, tuple[int, ...]] = {
        WORD_EMBEDDINGS: (spec.vocab_size, hidden),
        POSITION_EMBEDDINGS: (encoder.num_positions, hidden),
        TOKEN_TYPE_EMBEDDINGS: (encoder.num_segments, hidden),
    }
    norms = [INPUT_NORM]
    for index in range(len(spec.layers)):
        prefix = f"{LAYERS}.{index}."
        norms += [prefix + ATTENTION_NORM, prefix + MLP_NORM]
        for linear in layer_linear_modules(spec, index):
            for target, width in zip(linear.targets, linear.widths, strict=True):
                module = prefix + linear.kind.path(target)
                shapes |= {f"{module}.weight": (width, linear.d_in), f"{module}.bias": (width,)}
    return shapes | {f"{norm}.{part}": (hidden,) for norm in norms for part in ("weight", "bias")}


def without_heads(stored: Iterable[str]) -> dict[str, str]:
    """The encoder's own tensors of a checkpoint: stored name -> name without prefix."""
    found = {}
    for name in stored:
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        plain = name.removeprefix(prefix)
        if not plain.startswith(_UNREAD):
            found[name] = plain
    return found
