"""What an adapter holds on a device beside its rank rows, module by module and in bytes.

In: a `LoraAdapter` and its base's spec. Out: which modules need a scale, a shift or a whole weight, where the
replaced norms are, and how many bytes all of it takes. A layer's module becomes
`y = scale * (W x + B A x) + shift`, with W the base's weight or the adapter's own; what the vectors hold is
the backend's to compute. Counted in float32, outputs rounded up to whole panels of 16.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.lora import LoraAdapter, LoraKey
from app.engine.adapters.modules import Module, layer_modules
from app.engine.models.names import EMBEDDING, expected_tensors
from app.engine.models.spec import ModelSpec

_PANEL = 16


class ModuleExtras(NamedTuple):
    """What one module has beside rank rows. `weight`, `bias`: names in `LoraAdapter.replaced`, or None."""

    has_scale: bool
    has_shift: bool
    weight: str | None
    bias: str | None


def module_extras(adapter: LoraAdapter, spec: ModelSpec) -> dict[LoraKey, ModuleExtras]:
    """Every layer module that needs more than rank rows. A base bias under a scale has to be put right by a shift."""
    paths = {path: LoraKey(module.layer, module.targets[0]) for path, module in _linear(spec).items()}
    own = [(name, *name.rpartition(".")[::2]) for name in adapter.replaced]
    weights = {paths[path]: name for name, path, kind in own if path in paths and kind == "weight"}
    biases = {paths[path]: name for name, path, kind in own if path in paths and kind == "bias"}
    touched = {*adapter.magnitudes, *adapter.delta_biases, *weights, *biases}
    if not touched:
        return {}
    base = expected_tensors(spec)
    path_of = {key: path for path, key in paths.items()}
    found = {}
    for key in sorted(touched):
        has_scale, weight, bias = key in adapter.magnitudes, weights.get(key), biases.get(key)
        keeps_base_bias = f"{path_of[key]}.bias" in base and (has_scale or weight is not None)
        has_shift = bias is not None or key in adapter.delta_biases or keeps_base_bias
        found[key] = ModuleExtras(has_scale, has_shift, weight, bias)
    return found


def module_shift(
    adapter: LoraAdapter,
    key: LoraKey,
    parts: ModuleExtras,
    scale: NDArray[np.float32] | None,
    base_bias: NDArray[np.floating] | None,
    d_out: int,
) -> NDArray[np.float32]:
    """What remains to be added [d_out] to scale * (W x + base bias + B A x), or to the own W x."""
    base = np.zeros(d_out) if base_bias is None else base_bias.astype(np.float64)
    factor = np.ones(d_out) if scale is None else scale.astype(np.float64)
    shift = base if parts.bias is None else adapter.replaced[parts.bias].astype(np.float64)
    if parts.weight is None:
        shift = shift - factor * base
    if key in adapter.delta_biases:
        shift = shift + factor * adapter.delta_biases[key]
    return shift.astype(np.float32)


def replaced_norms(adapter: LoraAdapter) -> Iterable[str]:
    """Names of the norm weights that the adapter brings its own of."""
    return (name for name in adapter.replaced if name.endswith("norm.weight"))


def embedding_rows(adapter: LoraAdapter) -> NDArray[np.float32] | None:
    """Rows [n, H] that stand in for the embedding's: every token's, or those of `embedding_ids`."""
    rows = adapter.replaced.get(EMBEDDING)
    if "embed_tokens" not in adapter.token_rows:
        return rows
    token_ids, own_rows = adapter.token_rows["embed_tokens"]
    if rows is None:
        return own_rows
    rows = rows.copy()
    rows[list(token_ids)] = own_rows
    return rows


def embedding_ids(adapter: LoraAdapter) -> NDArray[np.int64] | None:
    """The token ids [n] of `embedding_rows`; None where it has none, or every token's."""
    if EMBEDDING in adapter.replaced or "embed_tokens" not in adapter.token_rows:
        return None
    return np.array(adapter.token_rows["embed_tokens"].token_ids, np.int64)


def extra_bytes(adapter: LoraAdapter, spec: ModelSpec) -> int:
    """Bytes beside the rank rows, once the adapter is on a device."""
    num_floats = sum(adapter.replaced[name].size for name in replaced_norms(adapter))
    for key, parts in module_extras(adapter, spec).items():
        d_in, d_out = spec.target_shape(key.layer, key.target)
        num_vectors = parts.has_scale + parts.has_shift
        num_floats += _padded(d_out) * (num_vectors + (d_in if parts.weight is not None else 0))
    hidden, vocab = spec.hidden_size, spec.vocab_size
    if EMBEDDING in adapter.replaced:
        num_floats += vocab * hidden
    if "lm_head.weight" in adapter.replaced:
        num_floats += _padded(vocab) * hidden
    if "embed_tokens" in adapter.outer:
        num_floats += adapter.outer["embed_tokens"].rank * (vocab + hidden)
    if "lm_head" in adapter.outer:
        rank = adapter.outer["lm_head"].rank
        num_floats += _padded(rank) * hidden + rank * _padded(vocab)
    num_ids = 0
    for name, (token_ids, _) in adapter.token_rows.items():
        if name == "embed_tokens" and EMBEDDING in adapter.replaced:
            continue  # they are written into it
        num_ids += len(token_ids)
        num_floats += hidden * (_padded(len(token_ids)) if name == "lm_head" else len(token_ids))
    return 4 * num_floats + 8 * num_ids


def _linear(spec: ModelSpec) -> dict[str, Module]:
    return {path: module for path, module in layer_modules(len(spec.layers)).items() if not module.is_fused}


def _padded(size: int) -> int:
    return -(-size // _PANEL) * _PANEL
