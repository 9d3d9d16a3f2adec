"""The feed-forward of each layer of a mixture of experts, from its `config.json`.

Lists the keys that each family reads; a value that would change the arithmetic and has no field in the spec is a
`CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.engine.errors import CheckpointError
from app.engine.models.hf.config_values import flag, layer_indices, positive
from app.engine.models.spec import MAX_EXPERTS, ExpertsSpec, MlpSpec, RouterSpec, SharedExpertSpec

#: A layer's feed-forward: `LayerSpec.mlp` and `LayerSpec.experts`.
FeedForward = tuple[MlpSpec, ExpertsSpec | None]

#: Keys that only matter in training.
_TRAINING_KEYS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
MIXTRAL_KEYS = _TRAINING_KEYS | {"num_local_experts", "num_experts", "num_experts_per_tok"}
OLMOE_KEYS = MIXTRAL_KEYS | {"norm_topk_prob"}
QWEN3_KEYS = OLMOE_KEYS | {"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size"}
QWEN2_KEYS = QWEN3_KEYS | {"shared_expert_intermediate_size"}
#: The last line of DEEPSEEK_KEYS is about training, placement and code that is not run.
GPT_OSS_KEYS = MIXTRAL_KEYS | {"experts_per_token", "swiglu_limit", "swiglu_alpha", "initial_context_length"}
DEEPSEEK_KEYS = frozenset({"n_routed_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size"})
DEEPSEEK_KEYS |= {"n_shared_experts", "first_k_dense_replace", "routed_scaling_factor", "topk_method", "n_group"}
DEEPSEEK_KEYS |= {"topk_group", "norm_topk_prob", "scoring_func", "moe_layer_freq"}
DEEPSEEK_KEYS |= {"output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size", "router_aux_loss_coef", "auto_map"}


def dense(_config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """No layer has experts."""
    return [(mlp, None)] * num_layers


def mixtral(config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """Experts of `intermediate_size` in every layer. Router weights are always normalised."""
    router = _router(config, 8, 2, normalised=True)
    return [(mlp, ExpertsSpec(router))] * num_layers


def olmoe(config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """Experts of `intermediate_size` in every layer."""
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


def deepseek(config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """`mlp` in the first `first_k_dense_replace` layers; in the others experts and a shared one without a gate."""
    for key, only in (("norm_topk_prob", False), ("scoring_func", "softmax"), ("moe_layer_freq", 1)):
        if config.get(key) not in (None, only):
            raise CheckpointError(f"config key {key!r} is {config[key]!r}; only {only!r} is what transformers computes")
    expert = replace(mlp, intermediate_size=positive(config, "moe_intermediate_size", 1407))
    shared = replace(mlp, intermediate_size=expert.intermediate_size * positive(config, "n_shared_experts", 2))
    given = {"num_experts": config.get("num_experts"), "num_local_experts": config.get("n_routed_experts")}
    router = replace(
        _router({**config, **given}, 64, 0, normalised=False), scale=_factor(config, "routed_scaling_factor")
    )
    if _is_grouped(config):
        groups, top_groups = positive(config, "n_group"), positive(config, "topk_group")
        if router.num_experts % groups or not top_groups <= groups:
            raise CheckpointError(
                f"n_group is {groups} and topk_group {top_groups}: {router.num_experts} experts do not divide so"
            )
        router = replace(router, num_groups=groups, top_groups=top_groups)
    first = config.get("first_k_dense_replace", 0)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise CheckpointError(f"config key 'first_k_dense_replace' is {first!r}; a number of layers is needed")
    experts = ExpertsSpec(router, SharedExpertSpec("shared_experts", shared, is_gated=False))
    return [(expert, experts) if layer >= first else (mlp, None) for layer in range(num_layers)]


def gpt_oss(config: Mapping[str, Any], mlp: MlpSpec, num_layers: int) -> list[FeedForward]:
    """Experts in every layer; gate and up alternate in one tensor, everything has a bias, and the router's softmax is
    over the chosen logits, which equals the chosen part of a softmax over all logits, normalised.
    """
    also = config.get("experts_per_token")
    if also is not None and also != config.get("num_experts_per_tok", 4):
        raise CheckpointError(f"experts_per_token is {also!r}, which is not num_experts_per_tok")
    router = replace(_router(config, 128, 4, normalised=True), name="router", has_bias=True)
    limit, alpha = _factor(config, "swiglu_limit", 7.0), _factor(config, "swiglu_alpha", 1.702)
    expert = replace(mlp, bias=True, limit=limit, alpha=alpha)
    return [(expert, ExpertsSpec(router, alternates=True))] * num_layers


def _is_grouped(config: Mapping[str, Any]) -> bool:
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"topk_method {method!r} is not supported; use 'greedy' or 'group_limited_greedy'")
    return bool(method == "group_limited_greedy")


def _factor(config: Mapping[str, Any], key: str, default: float = 1.0) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"config key {key!r} is {value!r}; a positive number is needed")
    return float(value)


def _sparse(
    config: Mapping[str, Any], mlp: MlpSpec, expert_size: int, experts: ExpertsSpec, num_layers: int
) -> list[FeedForward]:
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""
    step, dense_layers = positive(config, "decoder_sparse_step", 1), layer_indices(config, "mlp_only_layers")
    expert = replace(mlp, intermediate_size=expert_size)
    return [
        (expert, experts) if (layer + 1) % step == 0 and layer not in dense_layers else (mlp, None)
        for layer in range(num_layers)
    ]


def _router(config: Mapping[str, Any], default_count: int, default_top_k: int, *, normalised: bool) -> RouterSpec:
    """The number of experts has two names; which one transformers 5 writes depends on its version."""
    counts = {key: positive(config, key) for key in ("num_experts", "num_local_experts") if config.get(key) is not None}
    if len(set(counts.values())) > 1:
        raise CheckpointError(f"the config gives two different numbers of experts: {counts}")
    count = next(iter(counts.values()), default_count)
    if count > MAX_EXPERTS:
        raise CheckpointError(
            f"the config gives a layer {count} experts; at most {MAX_EXPERTS} are read. Is it damaged?"
        )
    top_k = positive(config, "num_experts_per_tok", default_top_k or None)
    if top_k > count:
        raise CheckpointError(f"num_experts_per_tok is {top_k} but the model has {count} experts")
    return RouterSpec(count, top_k, normalised)
