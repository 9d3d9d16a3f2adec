"""Published configurations, beside transformers' reading of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig

from app.engine.errors import CheckpointError
from app.engine.models.hf.config import spec_from_config
from tests.engine.models.published import PUBLISHED

READ = {name: model.config for name, model in PUBLISHED.items() if not model.refused}
REFUSED = {name: model for name, model in PUBLISHED.items() if model.refused}


@pytest.mark.parametrize("name", READ)
def test_a_published_model_is_read_as_transformers_reads_it(name: str) -> None:
    config: dict[str, Any] = json.loads(json.dumps(READ[name]))
    spec, theirs = spec_from_config(config, name, "00"), AutoConfig.for_model(**config)
    attention = spec.layers[0].attention
    assert (len(spec.layers), spec.hidden_size, spec.vocab_size, spec.max_positions) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.vocab_size,
        theirs.max_position_embeddings,
    )
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        head_dim,
    )
    kinds = getattr(theirs, "layer_types", None)
    slides = (
        [kind == "sliding_attention" for kind in kinds]
        if kinds
        else [theirs.model_type == "mistral"] * len(spec.layers)
    )
    wanted = [theirs.sliding_window if slide else None for slide in slides]
    assert [layer.attention.window for layer in spec.layers] == wanted
    assert (spec.norm_eps, spec.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_model_is_refused_for_what_it_needs(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(CheckpointError, match=reason):
        spec_from_config(config, name, "00")
