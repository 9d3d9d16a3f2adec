"""The feed-forward of each layer of a mixture of experts, from its `config.json`.

In: the parsed JSON of a Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE model, and what its dense feed-forward would be. Out:
per layer an `MlpSpec` and, where the layer has experts, an `ExpertsSpec`. The keys that each family reads are listed
here; a value that changes the arithmetic and is not represented is a `CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.engine.errors import CheckpointError
from app.engine.models.config_values import flag, layer_indices, positive
from app.engine.models.spec import MAX_EXPERTS, ExpertsSpec, MlpSpec, RouterSpec, SharedExpertSpec

#: A layer's feed-forward: `LayerSpec.mlp` and `LayerSpec.experts`.
FeedForward = tuple[MlpSpec, ExpertsSpec | None]

#: These weigh the loss of a model in training, or report on it.
_TRAINING_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
MIXTRAL_KEYS = _TRAINING_KEYS | {"num_local_experts", "num_experts", "num_experts_per_tok"}
OLMOE_KEYS = MIXTRAL_KEYS | {"norm_topk_prob"}
QWEN3_KEYS = OLMOE_KEYS | {"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size"}
QWEN2_KEYS = QWEN3_KEYS | {"shared_expert_intermediate_size"}


def dense(_config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """No layer has experts."""
    return [(mlp, None)] * num_layers


def mixtral(config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """Every layer; an expert is as wide as `intermediate_size`. Shares are always divided by their sum."""
    router = _router(config, 8, 2, normalised=True)
    return [(mlp, ExpertsSpec(router))] * num_layers


def olmoe(config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """Every layer; an expert is as wide as `intermediate_size`."""
    router = _router(config, 64, 8, normalised=flag(config, "norm_topk_prob"))
    return [(mlp, ExpertsSpec(router))] * num_layers


def qwen2(config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """Experts of `moe_intermediate_size` and a gated shared one in some layers, `mlp` in the others."""
    wide = positive(config, "shared_expert_intermediate_size", 5632)
    shared = SharedExpertSpec("shared_expert", replace(mlp, intermediate_size=wide), is_gated=True)
    router = _router(config, 60, 4, normalised=flag(config, "norm_topk_prob"))
    return _sparse(
        config, mlp, positive(config, "moe_intermediate_size", 1408), ExpertsSpec(router, shared), num_layers
    )


def qwen3(config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """Experts of `moe_intermediate_size` in some layers, `mlp` in the others."""
    router = _router(config, 128, 8, normalised=flag(config, "norm_topk_prob"))
    return _sparse(config, mlp, positive(config, "moe_intermediate_size", 768), ExpertsSpec(router), num_layers)


def _sparse(
    config: Mapping[str, Any], mlp: MlpSpec, expert_size: int, experts: ExpertsSpec, num_layers: int
) -> list[FeedForward]:
    """Each `decoder_sparse_step`-th layer has experts, those of `mlp_only_layers` excepted."""
    step, dense_layers = positive(config, "decoder_sparse_step", 1), layer_indices(config, "mlp_only_layers")
    expert = replace(mlp, intermediate_size=expert_size)
    return [
        (expert, experts) if (layer + 1) % step == 0 and layer not in dense_layers else (mlp, None)
        for layer in range(num_layers)
    ]


def _router(config: Mapping[str, Any], default_count: int, default_top_k: int, *, normalised: bool) -> RouterSpec:
    """How many experts there are goes by two names, of which transformers 5 writes whichever its release prefers."""
    counts = {key: positive(config, key) for key in ("num_experts", "num_local_experts") if config.get(key) is not None}
    if len(set(counts.values())) > 1:
        raise CheckpointError(f"the config says how many experts there are twice, and not alike: {counts}")
    count = next(iter(counts.values()), default_count)
    if count > MAX_EXPERTS:
        raise CheckpointError(
            f"the config gives a layer {count} experts; at most {MAX_EXPERTS} are read. Is it damaged?"
        )
    top_k = positive(config, "num_experts_per_tok", default_top_k)
    if top_k > count:
        raise CheckpointError(f"num_experts_per_tok is {top_k} but the model has {count} experts")
    return RouterSpec(count, top_k, normalised)
