"""An adapter's extra weights: what it changes besides low-rank deltas, as arrays for a device to lay out and apply.

`app.kernels.extra_weights.reference` defines how they apply. What can be computed once is computed here: a module
becomes `y = scale * (W x + B A x) + shift`, with W the base's weight or the adapter's own, whether DoRA, trained
biases, lora_bias or a replaced weight is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import BFLOAT16, LoraAdapter, LoraKey, LoraPair
from app.engine.models.linear_modules import LATENT_B, layer_linear_modules
from app.engine.models.spec import AttentionSpec, ModelSpec
from app.engine.models.weight_names import (
    EMBEDDING,
    FINAL_NORM,
    LATENT_NORMS,
    LAYER_NORMS,
    LM_HEAD,
    LatentNorm,
    LayerNorm,
)

Floats = NDArray[np.float32]

#: Kinds for a layer's module. weight: [d_out, d_in], replaces the base's. scale, shift: [d_out].
ModuleKind = Literal["weight", "scale", "shift"]
#: Kinds for the whole model; a `LayerNorm` ([H] or [head_dim]) is one layer's. Each replaces the base's.
#: final_norm: [H].
#: embed_rows: [n, H], replaces the rows embed_ids [n] (int64, ascending), or [N, H] without embed_ids; N is the number
#: of the adapter's tokens, V or another (`AdapterCard.vocab_size`).
#: embed_a, embed_b: [N, r] and [r, H]; token t gains b.T @ a[t].
#: head_weight: [V, H]. head_rows: [n, H], replaces the rows head_ids [n] (int64, ascending), or adds those from V on,
#: with their deltas.
#: head_a, head_b: [r, H] and [r, V]; logits gain b.T @ (a @ x).
ModelKind = Literal[
    "final_norm",
    "embed_rows",
    "embed_ids",
    "embed_a",
    "embed_b",
    "head_weight",
    "head_rows",
    "head_ids",
    "head_a",
    "head_b",
]
MODULE_KINDS: tuple[ModuleKind, ...] = get_args(ModuleKind)

_PANEL = 16
#: The axis that devices pad to whole panels of 16; counted padded.
_PADDED_AXES = {"weight": 0, "scale": 0, "shift": 0, "head_weight": 0, "head_rows": 0, "head_a": 0, "head_b": 1}


class ExtraWeight(NamedTuple):
    """One array. layer: None for the whole model's kinds; target: set for a module's kinds only.

    values are float32 (ids int64) or the saved dtype, and may be the adapter's own memory.
    """

    kind: ModuleKind | LayerNorm | LatentNorm | ModelKind
    layer: int | None
    target: str | None
    values: NDArray[Any]


class BaseWeights(Protocol):
    """The base's modules, as a device stores them."""

    def dora_scale(self, key: LoraKey, magnitude: Floats, pair: LoraPair) -> Floats:
        """m / ‖W + BA‖ [d_out] (`app.kernels.dora.reference`)."""
        ...

    def bias(self, key: LoraKey) -> Floats | None:
        """The module's bias [d_out], if it has one."""
        ...


def extra_weights(adapter: LoraAdapter, spec: ModelSpec, base: BaseWeights) -> tuple[ExtraWeight, ...]:
    """All extra weights of the adapter; () for plain LoRA."""
    if not adapter.features:
        return ()
    return (
        *_module_parts(adapter, spec, base),
        *_norm_parts(adapter),
        *_embedding_parts(adapter),
        *_head_parts(adapter, spec.vocab_size),
    )


def extra_bytes(adapter: LoraAdapter, spec: ModelSpec) -> int:
    """Device bytes besides rank rows: float32, outputs padded to whole panels.

    This includes experts' deltas, in the dtype they were saved in: each at its own rank, none for untouched experts.
    """
    if EMBEDDING in adapter.replaced:  # its rows are written into that matrix: avoid the copy just for a size
        rows = {name: rows for name, rows in adapter.token_rows.items() if name != "embed_tokens"}
        adapter = replace(adapter, token_rows=rows)
    total = expert_bytes(adapter, spec)
    for part in extra_weights(adapter, spec, _NoValues(spec)):
        shape = list(part.values.shape)
        if part.kind in _PADDED_AXES:
            axis = _PADDED_AXES[part.kind]
            shape[axis] = -(-shape[axis] // _PANEL) * _PANEL
        total += int(np.prod(shape)) * (8 if part.kind.endswith("ids") else 4)
    return total


def expert_bytes(adapter: LoraAdapter, spec: ModelSpec) -> int:
    """Bytes of the deltas of experts and of `kv_b_proj`'s heads, as `extra_bytes` counts them: rows of a in panels of
    eight, columns of b in panels of sixteen. A matrix that two modules share counts once.
    """
    pairs = [pair for key, pair in adapter.weights.items() if key.expert is not None]
    for key, pair in adapter.weights.items():
        if key.target in LATENT_B.targets:
            pairs += [one for ones in absorbed_pairs(pair, spec.layers[key.layer].attention) for one in ones]
    width = 2 if all(array.dtype == BFLOAT16 for pair in pairs for array in pair) else 4
    of_a: dict[int, int] = {id(a): -(-len(a) // 8) * 8 * a.shape[1] for a, _ in pairs}
    of_b: dict[int, int] = {id(b): len(b) * -(-b.shape[1] // _PANEL) * _PANEL for _, b in pairs}
    return width * (sum(of_a.values()) + sum(of_b.values()))


def absorbed_pairs(pair: LoraPair, attention: AttentionSpec) -> tuple[list[LoraPair], list[LoraPair]]:
    """A delta of `kv_b_proj` as per-head deltas of the modules that replace it (`absorbed_modules`): (keys, values).

    b.T @ a has a head's rows K of keys and V of values: K.T q = a.T @ (b_keys @ q), and V x = b_values.T @ (a @ x).
    """
    latent = attention.latent
    assert latent is not None, "only latent attention has this module"
    by_head = pair.b.reshape(len(pair.b), attention.num_heads, -1)  # [r, heads, key_size + value_size]
    keys, values = by_head[:, :, : latent.key_size], by_head[:, :, latent.key_size :]
    heads = range(attention.num_heads)
    return [LoraPair(keys[:, h], pair.a) for h in heads], [LoraPair(pair.a, values[:, h]) for h in heads]


class _NoValues:
    """Stands for a base when only sizes matter."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def dora_scale(self, key: LoraKey, magnitude: Floats, pair: LoraPair) -> Floats:  # noqa: ARG002
        return magnitude

    def bias(self, key: LoraKey) -> Floats | None:  # noqa: ARG002
        return None


def _module_parts(adapter: LoraAdapter, spec: ModelSpec, base: BaseWeights) -> Iterator[ExtraWeight]:
    for layer in range(len(spec.layers)):
        for module in layer_linear_modules(spec, layer):
            if not module.has_rank_rows:
                continue  # experts and absorbed heads have low-rank deltas only: `build_adapter` refuses the rest
            for target in module.targets:
                key, path = LoraKey(layer, target), f"model.layers.{layer}.{module.kind.path(target)}"
                weight, bias = adapter.replaced.get(f"{path}.weight"), adapter.replaced.get(f"{path}.bias")
                magnitude, delta_bias = adapter.magnitudes.get(key), adapter.delta_biases.get(key)
                if weight is not None:
                    yield ExtraWeight("weight", layer, target, weight)
                scale = None
                if magnitude is not None:
                    scale = base.dora_scale(key, magnitude, adapter.weights[key])
                    yield ExtraWeight("scale", layer, target, scale)
                # A shift corrects a base bias that gets scaled, or that is lost with the base's weight.
                wrongs_bias = module.has_bias and (scale is not None or weight is not None)
                if bias is not None or delta_bias is not None or wrongs_bias:
                    d_out = module.widths[module.targets.index(target)]
                    values = _shift(base.bias(key), scale, bias, delta_bias, d_out, has_weight=weight is not None)
                    yield ExtraWeight("shift", layer, target, values)


def _shift(
    base_bias: Floats | None,
    scale: Floats | None,
    bias: Floats | None,
    delta_bias: Floats | None,
    d_out: int,
    *,
    has_weight: bool,
) -> Floats:
    """What to add [d_out] to scale * (W x + base bias + B A x), or to the adapter's own W x."""
    base = np.zeros(d_out) if base_bias is None else base_bias.astype(np.float64)
    factor = np.ones(d_out) if scale is None else scale.astype(np.float64)
    shift = base if bias is None else bias.astype(np.float64)
    if not has_weight:
        shift = shift - factor * base
    if delta_bias is not None:
        shift = shift + factor * delta_bias
    return shift.astype(np.float32)


def _norm_parts(adapter: LoraAdapter) -> Iterator[ExtraWeight]:
    kinds: dict[str, LayerNorm | LatentNorm] = {path: kind for kind, path in (LAYER_NORMS | LATENT_NORMS).items()}
    for name, values in adapter.replaced.items():
        if name == FINAL_NORM:
            yield ExtraWeight("final_norm", None, None, values)
        elif name.endswith("norm.weight"):
            _, _, layer, path = name.removesuffix(".weight").split(".", 3)
            yield ExtraWeight(kinds[path], int(layer), None, values)


def _embedding_parts(adapter: LoraAdapter) -> Iterator[ExtraWeight]:
    rows = adapter.replaced.get(EMBEDDING)
    ids, token_rows = _token_rows(adapter, "embed_tokens")
    if rows is not None and len(ids):
        rows = rows.copy()
        rows[ids] = token_rows
    elif len(ids):
        yield ExtraWeight("embed_ids", None, None, ids)
        rows = token_rows
    if rows is not None:
        yield ExtraWeight("embed_rows", None, None, rows)
    if "embed_tokens" in adapter.outer:
        a, b = adapter.outer["embed_tokens"]
        yield ExtraWeight("embed_a", None, None, a.T)
        yield ExtraWeight("embed_b", None, None, b)


def _head_parts(adapter: LoraAdapter, num_base: int) -> Iterator[ExtraWeight]:
    """Logits of the base's tokens, num_base, and after them as token rows those of tokens that it lacks."""
    weight, pair = adapter.replaced.get(LM_HEAD), adapter.outer.get("lm_head")
    ids, rows = _token_rows(adapter, "lm_head")
    if weight is not None:
        beyond = np.setdiff1d(np.arange(num_base, len(weight)), ids)
        if len(beyond):
            rows = np.concatenate([rows.reshape(-1, weight.shape[1]), weight[beyond]])
            ids = np.concatenate([ids, beyond])
            order = np.argsort(ids)
            ids, rows = ids[order], rows[order]
        yield ExtraWeight("head_weight", None, None, _with_length(weight, num_base))
    first = int(np.searchsorted(ids, num_base))
    if pair is not None and first < len(ids):
        rows = rows.copy()
        rows[first:] += pair.b[:, ids[first:]].T @ pair.a
    if len(ids):
        yield ExtraWeight("head_ids", None, None, ids)
        yield ExtraWeight("head_rows", None, None, rows)
    if pair is not None:
        yield ExtraWeight("head_a", None, None, pair.a)
        yield ExtraWeight("head_b", None, None, _with_length(pair.b.T, num_base).T)


def _with_length(values: Floats, length: int) -> Floats:
    """The first `length` rows; zeros where there are fewer."""
    if len(values) >= length:
        return values[:length]
    return np.concatenate([values, np.zeros((length - len(values), *values.shape[1:]), values.dtype)])


def _token_rows(adapter: LoraAdapter, name: str) -> tuple[NDArray[np.int64], Floats]:
    """(ids [n] ascending, rows [n, H]); n is 0 if the adapter has none."""
    if name not in adapter.token_rows:
        return np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
    token_ids, rows = adapter.token_rows[name]
    ids = np.array(token_ids, np.int64)
    order = np.argsort(ids)
    return ids[order], rows[order]
