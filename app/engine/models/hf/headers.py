"""Decoders of families that this project cannot compute, described by their checkpoints' headers.

Adapters need the shapes of linear modules only; another program (`engine.vllm`) knows the arithmetic. Experts' weights
are not described, so a LoRA on them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from app.engine.errors import CheckpointError
from app.engine.models.hf.config import eos_token_ids, token_id, unknown_family
from app.engine.models.hf.config_values import positive
from app.engine.models.hf.safetensors_folder import TensorPlace
from app.engine.models.spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
    StoredModule,
    checked_num_layers,
)
from app.engine.models.weight_names import LM_HEAD, UNPACKED

_MODULE = re.compile(r"model\.layers\.(\d{1,4})\.([A-Za-z_][A-Za-z0-9_.]*)\.(?:weight|qweight|weight_packed)")
_NO_ATTENTION = AttentionSpec(num_heads=0, num_kv_heads=0, head_dim=0, scale=0.0, rope=RopeSpec(()))


def spec_from_headers(
    config: Mapping[str, Any],
    name: str,
    digest: str,
    stored: Mapping[str, TensorPlace],
    generation_config: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """A spec whose layers have `LayerSpec.stored` modules: every matrix of theirs that is not an expert's.

    CheckpointError if there are none under transformers' names, or if weights are packed, so that no shape is theirs.
    """
    family, num_layers = config.get("model_type"), checked_num_layers(positive(config, "num_hidden_layers"))
    if not isinstance(family, str):
        raise CheckpointError(f"config key 'model_type' is {family!r}; a family's name is needed")
    layers: dict[int, list[StoredModule]] = {}
    for key, place in sorted(stored.items()):
        match = _MODULE.fullmatch(key)
        if match is None or ".experts." in key or len(place.shape) != 2 or int(match[1]) >= num_layers:
            continue  # layers beyond the last predict several tokens at once
        if place.dtype not in UNPACKED or not key.endswith(".weight"):
            raise CheckpointError(f"{key!r} of model_type {family!r} is packed ({place.dtype}): its shape is unknown")
        d_out, d_in = place.shape
        layers.setdefault(int(match[1]), []).append(StoredModule(match[2], d_in, d_out))
    if sorted(layers) != list(range(num_layers)):
        raise CheckpointError(
            f"{unknown_family(config)}; engine.vllm needs matrices named model.layers.N.….weight in all of its "
            f"{num_layers} layers, and {name!r} has them in {len(layers)}"
        )
    empty = MlpSpec(0)
    return ModelSpec(
        name=name,
        family=family,
        digest=digest,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=positive(config, "hidden_size"),
        max_positions=positive(config, "max_position_embeddings"),
        norm_eps=0.0,
        tie_embeddings=LM_HEAD not in stored,
        layers=tuple(LayerSpec(_NO_ATTENTION, empty, stored=tuple(layers[index])) for index in range(num_layers)),
        bos_token_id=token_id(config.get("bos_token_id"), "bos_token_id"),
        eos_token_ids=eos_token_ids(config, generation_config),
    )
