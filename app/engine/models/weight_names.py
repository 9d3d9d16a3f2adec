"""Canonical (Hugging Face) names and shapes of a model's tensors, and GGUF's names for them.

A checkpoint is complete if its tensors are exactly those that the `ModelSpec` implies; `check_tensors` names the first
that differs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from numpy.typing import NDArray

from app.engine.errors import CheckpointError
from app.engine.models.hf.encoder_weight_names import encoder_tensors
from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import AttentionSpec, ModelSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

#: This project's names for a layer's norms.
LayerNorm = Literal["attention_norm", "mlp_norm", "q_norm", "k_norm"]
#: MLA's norms, in place of those of queries and keys.
LatentNorm = Literal["query_latent_norm", "latent_norm"]
#: Their paths in a layer of a checkpoint.
LAYER_NORMS: dict[LayerNorm, str] = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
LATENT_NORMS: dict[LatentNorm, str] = {
    "query_latent_norm": "self_attn.q_a_layernorm",
    "latent_norm": "self_attn.kv_a_layernorm",
}
#: Norms of the outputs of attention and feed-forward, in layers with `post_norms`.
POST_NORMS = {"post_attention_norm": "self_attn.output_norm", "post_mlp_norm": "mlp.output_norm"}
#: Path of attention's sinks in the layer: a tensor, not a module.
SINKS = "self_attn.sinks"
#: Types of weights with one number per element.
UNPACKED = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_GGUF_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": LM_HEAD}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "self_attn.output_norm",
    "post_ffw_norm": "mlp.output_norm",
}
#: Mixtures: one tensor for all experts of a layer, named here without ".weight" (`moe_weight_layouts`).
_GGUF_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GGUF_LAYER |= {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GGUF_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]*)\.([a-z_]+)\.(weight|bias)")


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of `spec`; a weight is [d_out, d_in]. A tied model has no lm_head.

    Norms are not among those of a model with `LayerSpec.stored` modules.
    """
    if spec.encoder is not None:
        return encoder_tensors(spec)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for index, layer in enumerate(spec.layers):
        prefix = f"model.layers.{index}."
        widths: dict[LayerNorm, int] = {"attention_norm": spec.hidden_size, "mlp_norm": spec.hidden_size}
        widths = {} if layer.stored else widths | qk_norm_widths(layer.attention)
        latent = latent_norm_widths(layer.attention)
        shapes |= {f"{prefix}{LATENT_NORMS[norm]}.weight": (width,) for norm, width in latent.items()}
        shapes |= {f"{prefix}{LAYER_NORMS[norm]}.weight": (width,) for norm, width in widths.items()}
        if layer.attention.sinks:
            shapes[f"{prefix}{SINKS}"] = (layer.attention.num_heads,)
        if layer.post_norms:
            shapes |= {f"{prefix}{path}.weight": (spec.hidden_size,) for path in POST_NORMS.values()}
        for linear in layer_linear_modules(spec, index):
            for (target, width), expert in itertools.product(
                zip(linear.targets, linear.widths, strict=True), linear.experts
            ):
                module = prefix + linear.kind.path(target, expert)
                shapes[f"{module}.weight"] = (width, linear.d_in)
                if linear.has_bias:
                    shapes[f"{module}.bias"] = (width,)
    if not any(layer.stored for layer in spec.layers):
        shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tie_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def qk_norm_widths(attention: AttentionSpec) -> dict[LayerNorm, int]:
    """Widths of the norms of queries and keys: one head's, or all heads'; {} if there are none."""
    if not attention.qk_norm:
        return {}
    heads = (attention.num_heads, attention.num_kv_heads) if attention.whole_qk_norm else (1, 1)
    return {"q_norm": heads[0] * attention.head_dim, "k_norm": heads[1] * attention.head_dim}


def latent_norm_widths(attention: AttentionSpec) -> dict[LatentNorm, int]:
    """Widths of MLA's norms; {} if there are none."""
    latent = attention.latent
    if latent is None:
        return {}
    widths: dict[LatentNorm, int] = {"latent_norm": latent.kv_rank}
    return widths if latent.query_rank is None else {"query_latent_norm": latent.query_rank, **widths}


def check_tensors(spec: ModelSpec, found: Mapping[str, tuple[int, ...]]) -> None:
    """CheckpointError unless `found` (name -> shape) is exactly what `spec` implies."""
    expected = expected_tensors(spec)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"checkpoint of {spec.name!r} lacks {_first_names(missing)}")
    unexpected = [name for name in found if name not in expected]
    if unexpected:
        raise CheckpointError(
            f"checkpoint of {spec.name!r} has tensors its config does not imply: {_first_names(unexpected)}"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise CheckpointError(f"tensor {name!r} has shape {list(found[name])}; the config implies {list(shape)}")


def checked_tensors(spec: ModelSpec, tensors: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield every tensor; CheckpointError for one that `spec` does not imply or that comes twice and, at the end, if
    any is missing."""
    missing = set(expected_tensors(spec))
    for name, tensor in tensors:
        if name not in missing:
            raise CheckpointError(f"tensor {name!r} has no place in {spec.name}, or came twice")
        missing.discard(name)
        yield name, tensor
    if missing:
        raise CheckpointError(f"{spec.name} lacks {len(missing)} tensors, the first: {min(missing)!r}")


def check_quantised(spec: ModelSpec, found: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """CheckpointError unless `found` (name -> shape and stored type) has every module of `spec`, in its shape where the
    weights are not packed. Experts, whose layouts differ by method, are not looked at."""
    modules = {name.removesuffix(".weight"): shape for name, shape in expected_tensors(spec).items()}
    for module, shape in modules.items():
        if ".experts." in module or module.endswith(".bias"):
            continue
        stored, dtype = found.get(f"{module}.weight", ((), ""))
        if not dtype and f"{module}.qweight" not in found and f"{module}.weight_packed" not in found:
            raise CheckpointError(f"checkpoint of {spec.name!r} lacks {module!r}")
        if dtype in UNPACKED and tuple(stored) != shape:
            raise CheckpointError(f"module {module!r} has shape {list(stored)}; the config implies {list(shape)}")


def canonical_gguf_name(name: str, own: Mapping[str, str] | None = None) -> str | None:
    """The canonical name of a GGUF tensor, or None if no supported model has it.

    own: an architecture's own names within a layer and their paths, which take precedence.
    """
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    match = _GGUF_LAYER_NAME.fullmatch(name)
    if match is None:
        return None
    layer, module, kind = match.groups()
    if module in _GGUF_EXPERTS:
        return f"model.layers.{layer}.{_GGUF_EXPERTS[module]}{'_bias' if kind == 'bias' else ''}"
    path = (own or {}).get(module, _GGUF_LAYER.get(module))
    if path == SINKS:
        return f"model.layers.{layer}.{path}" if kind == "weight" else None
    return None if path is None else f"model.layers.{layer}.{path}.{kind}"


def _first_names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
