"""Packs a checkpoint's tensors into the layout of the CPU decoder: panels, stacked over layers.

Tensors come by their Hugging Face names, in any order, each exactly once; at most one unpacked tensor is in memory.
`app.engine.models.linear_modules` defines which modules share a product and where each begins in it,
`app.engine.models.weight_stacks` which stacks are in 8 bits.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraKey
from app.engine.config import WeightDtype
from app.engine.cpu import decoder as cpu_decoder
from app.engine.cpu.encoder import EncoderWeights
from app.engine.cpu.mla import MlaWeights
from app.engine.cpu.moe import MoeWeights
from app.engine.models.linear_modules import (
    LATENT_B,
    LATENT_KEYS,
    LATENT_VALUES,
    StackedModule,
    linear_module_of,
    paged_modules,
    shared_table_modules,
    stacked_modules,
)
from app.engine.models.rope import rope_tables
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import (
    EMBEDDING,
    FINAL_NORM,
    LATENT_NORMS,
    LAYER_NORMS,
    LM_HEAD,
    POST_NORMS,
    SINKS,
    checked_tensors,
    latent_norm_widths,
    qk_norm_widths,
)
from app.engine.models.weight_stacks import Products
from app.kernels.bf16_matmul.cpu import Bf16Panels, float32_panels
from app.kernels.int8_matmul.cpu import DotPanels
from app.kernels.int8_matmul.pack_dot import unpack_dot
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.cpu import PANEL
from app.kernels.matmul.int8 import Int8Panels, Stack
from app.kernels.matmul.pack_weights import dequantise

Floats = NDArray[np.float32]

_LOGGER = logging.getLogger(__name__)


def decoder_sizes(spec: ModelSpec) -> cpu_decoder.Sizes:
    """The sizes of this model. Raises CheckpointError for layers whose attention is of unequal size."""
    first, qkv = spec.layers[0], stacked_modules(spec)[0].module
    q_size, kv_size = (0, 0) if first.attention.latent is not None else qkv.padded_widths(PANEL)[:2]
    routers = [layer.experts.router for layer in spec.layers if layer.experts is not None]
    return cpu_decoder.Sizes(
        num_heads=first.attention.num_heads, num_kv_heads=first.attention.num_kv_heads,
        head_dim=first.attention.head_dim, q_size=q_size, kv_size=kv_size, gelu=first.mlp.activation == "gelu_tanh",
        eps=np.float32(spec.norm_eps), post_norms=first.post_norms, softcap=np.float32(first.attention.softcap or 0.0),
        logit_softcap=np.float32(spec.logit_softcap or 0.0), embedding_scale=np.float32(spec.embedding_scale),
        whole_norm=first.attention.whole_qk_norm, normalised=bool(routers) and routers[0].normalised,
        limit=np.float32(first.mlp.limit or 0.0), alpha=np.float32(first.mlp.alpha),
        share_scale=np.float32(routers[0].scale if routers else 1.0),
        num_groups=routers[0].num_groups if routers else 1, top_groups=routers[0].top_groups if routers else 1,
    )  # fmt: skip


def product_rows(spec: ModelSpec, num_tokens: int, num_samples: int) -> dict[str, int]:
    """The most rows of each product that `engine.cpu.compute` covers: all but routers and gates of shared experts.

    These choose or weigh experts, a fraction of a percent of the work: llama.cpp keeps them in float32 too.
    """
    mixture = next((layer.experts for layer in spec.layers if layer.experts is not None), None)
    rows = {"head": num_samples}
    for module, _ in stacked_modules(spec):
        if module.name not in ("router", "shared_gate"):
            per_token = mixture.router.top_k if mixture is not None and module.num_experts is not None else 1
            rows[module.name] = num_tokens * per_token
    if spec.layers[0].attention.latent is not None:
        rows |= dict.fromkeys((LATENT_KEYS.name, LATENT_VALUES.name), num_tokens * spec.layers[0].attention.num_heads)
    return rows


class PackedModules:
    """The base model's linear modules, for `AdapterExtras`."""

    def __init__(self, spec: ModelSpec, weights: cpu_decoder.Weights | EncoderWeights) -> None:
        stacked = stacked_modules(spec)
        self._name, self._modules, self._weights = spec.name, shared_table_modules(stacked), weights
        self._layers = {module.name: layers for module, layers in stacked}

    def panels(self, key: LoraKey) -> Floats:
        """A module's weight as float32 panels [P, d_in, 16]."""
        module = linear_module_of(self._modules, key.target)
        own = module.columns(key.target, PANEL)
        columns = slice(own.start // PANEL, -(-own.stop // PANEL))
        stack: Stack = self._array(module.name)
        stacked_layer = self._layers[module.name].index(key.layer)
        if isinstance(stack, Bf16Panels):
            return float32_panels(stack.pairs[stacked_layer, columns], module.d_in)
        if isinstance(stack, DotPanels):
            at = (stacked_layer, columns)
            own_panels = type(stack)(stack.levels[at], stack.scales[at], stack.offsets[at], stack.rows)
            return dequantise(unpack_dot(own_panels, module.d_in))
        if isinstance(stack, Int8Panels):
            return dequantise(Int8Panels._make(part[stacked_layer, columns] for part in stack))
        return stack[stacked_layer, columns]

    def bias(self, key: LoraKey) -> Floats | None:
        """A module's bias [d_out], if it has one."""
        module = linear_module_of(self._modules, key.target)
        if not module.has_bias:
            return None
        biases: Floats = self._array(f"{module.name}_bias")
        stacked_layer = self._layers[module.name].index(key.layer)
        return biases[stacked_layer, module.columns(key.target, PANEL)]

    def log_storage(self) -> None:
        """Log at start which modules have which type, so that an operator sees what `auto` chose."""
        names = [module.name for module in self._modules] + ["head"] * hasattr(self._weights, "head")
        kinds = {"float32": np.ndarray, "8 bits": Int8Panels | DotPanels, "bfloat16": Bf16Panels}
        found = {
            title: [name for name in names if isinstance(self._array(name), kind)] for title, kind in kinds.items()
        }
        parts = [f"in {title}: {', '.join(own)}" for title, own in found.items() if own]
        _LOGGER.info("%s: base weights %s", self._name, "; ".join(parts))

    def _array(self, name: str) -> Any:
        """The array of a linear module or of its biases, in the model's, its experts' or its MLA weights."""
        weights: Any = self._weights
        parts = (weights, getattr(weights, "moe", None), getattr(weights, "mla", None))
        return next(getattr(part, name) for part in parts if part is not None and name in part._fields)


_IN_FLOAT32 = Products("float32", {})


class WeightPacker:
    """Fills the stacked arrays tensor by tensor, so that at most one unpacked tensor is in memory."""

    def __init__(
        self, spec: ModelSpec, max_positions: int, weight_dtype: WeightDtype, team: ThreadTeam,
        products: Products = _IN_FLOAT32,
    ) -> None:  # fmt: skip
        self._spec, self._products = spec, products
        count, hidden = len(spec.layers), spec.hidden_size
        attentions = [layer.attention for layer in spec.layers]
        stacked = stacked_modules(spec)
        norm_widths, latent_widths = qk_norm_widths(attentions[0]), latent_norm_widths(attentions[0])

        def zeros(*shape: int) -> Floats:
            return np.zeros(shape, np.float32)

        self._arrays: dict[str, Floats] = {
            "embedding": zeros(0 if spec.tie_embeddings else spec.vocab_size, hidden),
            "final_norm": zeros(hidden),
            "attention_norm": zeros(count, hidden),
            "mlp_norm": zeros(count, hidden),
            **{name: zeros(count, hidden if spec.layers[0].post_norms else 0) for name in POST_NORMS},
            "q_norm": zeros(count, norm_widths.get("q_norm", 0)),
            "k_norm": zeros(count, norm_widths.get("k_norm", 0)),
            "query_latent_norm": zeros(count, latent_widths.get("query_latent_norm", 0)),
            "latent_norm": zeros(count, latent_widths.get("latent_norm", 0)),
            "sinks": zeros(count, attentions[0].num_heads if attentions[0].sinks else 0),
            "qkv_bias": zeros(0, 0),  # for a model without this module
            "gate_up_bias": zeros(0, 0),  # for a model without such layers
            "down_bias": zeros(0, 0),
        }
        self._stacks = {"head": products.writer("head", (1, spec.vocab_size, hidden), weight_dtype, team)}
        self._places: dict[str, tuple[str, int, int]] = {}  # module -> stack, index in it, first column
        absorbed = [one for one in paged_modules(spec) if one.module not in [other.module for other in stacked]]
        for one in (*stacked, *absorbed):
            if one.module.kind is not LATENT_B:
                self._make_room(one, weight_dtype, team)
        self._constants: dict[str, NDArray[Any]] = {
            **rope_tables(spec, max_positions)._asdict(),
            "layer_window": np.array([a.window or 0 for a in attentions], np.int64),
            "scales": np.array([a.scale for a in attentions], np.float32),
        }
        self._norms: dict[str, str] = {path: name for name, path in (LAYER_NORMS | LATENT_NORMS | POST_NORMS).items()}

    def _make_room(self, stacked: StackedModule, weight_dtype: WeightDtype, team: ThreadTeam) -> None:
        """Allocate the stack of one linear module, for the layers that have it and each of its experts."""
        module, layers = stacked
        width, experts = module.width(PANEL), module.experts
        shape = len(layers) * len(experts), width, module.d_in
        self._stacks[module.name] = self._products.writer(module.name, shape, weight_dtype, team)
        bias_shape = (len(layers) * len(experts), width) if module.has_bias else (len(layers), 0)
        if module.num_experts is not None and not module.has_bias:
            bias_shape = (0, 0)
        self._arrays[f"{module.name}_bias"] = np.zeros(bias_shape, np.float32)
        for index, (layer, expert) in enumerate(itertools.product(layers, experts)):
            for target, start in zip(module.targets, module.starts(PANEL), strict=True):
                path = f"model.layers.{layer}.{module.kind.path(target, expert)}"
                self._places[path] = module.name, index, start

    def pack_all(self, tensors: Iterable[tuple[str, np.ndarray]]) -> cpu_decoder.Weights:
        """Pack every tensor; CheckpointError for one that has no place or is missing, ConfigError as in
        `Products.stacks`."""
        for name, tensor in checked_tensors(self._spec, tensors):
            self._place(name, np.asarray(tensor).astype(np.float32, copy=False))
        stacks = self._products.stacks(self._spec.name, self._stacks)
        parts = {
            "moe": _moe_weights(self._spec, stacks, self._arrays),
            "mla": _mla_weights(self._spec, stacks, self._arrays),
        }
        fields = self._arrays | dict.fromkeys(("qkv", "gate_up", "down"), _ABSENT) | stacks | self._constants | parts
        return cpu_decoder.Weights(**{name: fields[name] for name in cpu_decoder.Weights._fields})  # type: ignore[arg-type]

    def _place(self, name: str, tensor: Floats) -> None:
        if name == LM_HEAD or (name == EMBEDDING and self._spec.tie_embeddings):
            self._stacks["head"].store(0, 0, tensor)
        elif name == EMBEDDING:
            self._arrays["embedding"][:] = tensor
        elif name == FINAL_NORM:
            self._arrays["final_norm"][:] = tensor
        else:
            path, kind = name.rsplit(".", 1)
            _, _, layer, module = path.split(".", 3)
            if module in self._norms:
                self._arrays[self._norms[module]][int(layer)] = tensor
                return
            if module.endswith(LATENT_B.targets[0]):
                self._place_latent_heads(int(layer), tensor)
                return
            if name.endswith(f".{SINKS}"):
                self._arrays["sinks"][int(layer)] = tensor
                return
            stack_name, index, column = self._places[path]
            if kind == "bias":
                self._arrays[f"{stack_name}_bias"][index, column : column + len(tensor)] = tensor
            else:
                self._stacks[stack_name].store(index, column, tensor)

    def _place_latent_heads(self, layer: int, tensor: Floats) -> None:
        """Store kv_b_proj's rows head by head: keys transposed, values as they are."""
        attention = self._spec.layers[layer].attention
        assert attention.latent is not None, "only latent attention has this module"
        heads = tensor.reshape(attention.num_heads, -1, attention.latent.kv_rank)
        for head, rows in enumerate(heads):
            keys, values = rows[: attention.latent.key_size], rows[attention.latent.key_size :]
            index = layer * attention.num_heads + head
            self._stacks[LATENT_KEYS.name].store(index, 0, np.ascontiguousarray(keys.T))
            self._stacks[LATENT_VALUES.name].store(index, 0, values)


#: A stack of no layers.
_ABSENT = np.zeros((0, 1, 1, PANEL), np.float32)


def _moe_weights(spec: ModelSpec, stacks: Mapping[str, Stack], arrays: Mapping[str, Floats]) -> MoeWeights | None:
    has_experts = np.array([layer.experts is not None for layer in spec.layers])
    if not has_experts.any():
        return None
    return MoeWeights(
        stacked_layer=np.where(has_experts, np.cumsum(has_experts) - 1, -1),
        stacked_dense_layer=np.where(has_experts, -1, np.cumsum(~has_experts) - 1), router=stacks["router"],
        gate_up=stacks["experts_gate_up"], down=stacks["experts_down"], shared_gate=stacks.get("shared_gate", _ABSENT),
        shared_gate_up=stacks.get("shared_gate_up", _ABSENT), shared_down=stacks.get("shared_down", _ABSENT),
        router_bias=arrays["router_bias"], gate_up_bias=arrays["experts_gate_up_bias"],
        down_bias=arrays["experts_down_bias"], no_bias=np.zeros(0, np.float32),
    )  # fmt: skip


def _mla_weights(spec: ModelSpec, stacks: Mapping[str, Stack], arrays: Mapping[str, Floats]) -> MlaWeights | None:
    latent = spec.layers[0].attention.latent
    if latent is None:
        return None
    nothing = np.zeros((len(spec.layers), 0), np.float32)
    return MlaWeights(
        query=stacks.get("query", _ABSENT), query_a=stacks.get("query_a", _ABSENT),
        query_a_bias=arrays.get("query_a_bias", nothing), query_b=stacks.get("query_b", _ABSENT),
        latent_a=stacks["latent_a"], latent_a_bias=arrays["latent_a_bias"], latent_keys=stacks[LATENT_KEYS.name],
        latent_values=stacks[LATENT_VALUES.name], query_latent_norm=arrays["query_latent_norm"],
        latent_norm=arrays["latent_norm"], no_bias=np.zeros(0, np.float32), no_biases=np.zeros((0, 0), np.float32),
        key_size=latent.key_size, rope_size=latent.rope_size, norm_eps=np.float32(latent.norm_eps),
    )  # fmt: skip
