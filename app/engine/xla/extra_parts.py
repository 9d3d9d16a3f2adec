"""An adapter's extras as the arrays that the XLA forms keep in memory, cut for each shard.

In: a `LoraAdapter`, and what of it depends on the base: DoRA's scales, biases. Out: `Part`s, each with the entry of
`OwnTables` that will say where it lies, and the counts of those tables. Nothing is laid out wider than
`AdapterCard.extra_bytes` counts it, in any shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.extras import ModuleExtras, embedding_rows, module_extras, module_shift, replaced_norms
from app.engine.adapters.lora import TARGETS, LoraAdapter, LoraKey
from app.engine.cpu.extras import layer_norm
from app.engine.models.names import FINAL_NORM, LM_HEAD
from app.engine.models.spec import ModelSpec
from app.engine.xla.sizes import GROUP_OF, ROW_PARALLEL, Sizes, shard_columns, whole_output
from app.engine.xla.weights import LayerWeights
from app.kernels.extras import xla as own

Floats = NDArray[np.float32]


class Part(NamedTuple):
    """An array [shards, n], and the entry of `OwnTables` that says where it lies. layer: None in `slots`."""

    table: Literal["modules", "norms", "slots"]
    layer: int | None
    entry: tuple[int, ...]
    array: Floats


class BaseValues(NamedTuple):
    """What an adapter's parts need of the base. scales: DoRA's, [d_out]. bias: a module's [d_out], or None."""

    scales: Mapping[LoraKey, Floats]
    bias: Callable[[LoraKey], Floats | None]


def parts_of(adapter: LoraAdapter, spec: ModelSpec, sizes: Sizes, base: BaseValues) -> Iterator[Part]:
    """Everything the adapter has beside rank rows."""
    yield from _module_parts(adapter, spec, sizes, base)
    for name in replaced_norms(adapter):
        array = adapter.replaced[name]
        if name == FINAL_NORM:
            yield Part("slots", None, (own.FINAL_NORM,), _everywhere(array, sizes))
        else:
            layer, norm = layer_norm(name)
            yield Part("norms", layer, (norm,), _everywhere(array, sizes))
    if (rows := embedding_rows(adapter)) is not None:
        yield Part("slots", None, (own.EMBED_ROWS,), _everywhere(rows, sizes))
    if "embed_tokens" in adapter.outer:
        a, b = adapter.outer["embed_tokens"]
        yield Part("slots", None, (own.EMBED_A,), _everywhere(a.T, sizes))
        yield Part("slots", None, (own.EMBED_B,), _everywhere(b, sizes))
    if LM_HEAD in adapter.replaced:
        yield Part("slots", None, (own.HEAD_WEIGHT,), _by_vocabulary(adapter.replaced[LM_HEAD], sizes))
    if "lm_head" in adapter.token_rows:
        token_ids, rows = adapter.token_rows["lm_head"]
        yield Part("slots", None, (own.HEAD_ROWS,), _everywhere(rows, sizes))
        yield Part("slots", None, (own.HEAD_IDS,), _everywhere(np.array(token_ids, np.float32), sizes))
    if "lm_head" in adapter.outer:
        a, b = adapter.outer["lm_head"]
        yield Part("slots", None, (own.HEAD_A,), _everywhere(a, sizes))
        by_shard = _by_vocabulary(b.T, sizes).reshape(sizes.num_shards, -1, len(b))
        yield Part("slots", None, (own.HEAD_B,), by_shard.swapaxes(1, 2).reshape(sizes.num_shards, -1))


def base_bias(
    layers: LayerWeights, spec: ModelSpec, sizes: Sizes, columns: Mapping[str, NDArray[np.int64]], key: LoraKey
) -> Floats | None:
    """The base's bias of a module [d_out], if it has one. columns: `shard_columns`."""
    group = GROUP_OF[key.target]
    biases = getattr(layers, f"{group}_bias")
    if biases is None:
        return None
    bias: Floats = np.asarray(biases)[key.layer]
    return bias if group in ROW_PARALLEL else whole_output(bias, spec, sizes, columns, key)


def counts_of(adapter: LoraAdapter) -> dict[int, int]:
    """The counts of `OwnTables.slots` that are not zero, by column."""
    counts = {}
    if "embed_tokens" in adapter.outer:
        counts[own.EMBED_RANK] = adapter.outer["embed_tokens"].rank
    if "lm_head" in adapter.token_rows:
        counts[own.NUM_HEAD_IDS] = len(adapter.token_rows["lm_head"].token_ids)
    if "lm_head" in adapter.outer:
        counts[own.HEAD_RANK] = adapter.outer["lm_head"].rank
    return counts


def _module_parts(adapter: LoraAdapter, spec: ModelSpec, sizes: Sizes, base: BaseValues) -> Iterator[Part]:
    columns = shard_columns(spec, sizes.num_shards)
    for key, extras in module_extras(adapter, spec).items():
        mine, is_row = columns[key.target], GROUP_OF[key.target] in ROW_PARALLEL
        _, d_out = spec.target_shape(key.layer, key.target)
        module = TARGETS.index(key.target)

        def cut(vector: Floats, mine: NDArray[np.int64] = mine, is_row: bool = is_row) -> Floats:
            return _everywhere(vector, sizes) if is_row else vector[mine]

        if extras.weight is not None:
            weight = adapter.replaced[extras.weight]
            by_shard = weight[:, mine].swapaxes(0, 1) if is_row else weight[mine]
            yield Part("modules", key.layer, (module, own.WEIGHT), by_shard.reshape(sizes.num_shards, -1))
        scale = base.scales.get(key)
        if scale is not None:
            yield Part("modules", key.layer, (module, own.SCALE), cut(scale))
        if extras.has_shift:
            bias = base.bias(key)
            if is_row and sizes.num_shards > 1:
                shifts = _first_shards_shift(adapter, key, extras, scale, bias, d_out, sizes.num_shards)
            else:
                shifts = cut(module_shift(adapter, key, extras, scale, bias, d_out))
            yield Part("modules", key.layer, (module, own.SHIFT), shifts)


def _first_shards_shift(
    adapter: LoraAdapter, key: LoraKey, extras: ModuleExtras, scale: Floats | None, bias: Floats | None, d_out: int,
    num_shards: int,
) -> Floats:  # fmt: skip
    """[shards, d_out] of a module whose outputs are sums over shards, to which the base's bias is added as it is."""
    shift = module_shift(adapter, key, extras, scale, None, d_out)
    if extras.bias is not None and bias is not None:
        shift = shift - bias
    shifts = np.zeros((num_shards, d_out), np.float32)
    shifts[0] = shift
    return shifts


def _everywhere(array: Floats, sizes: Sizes) -> Floats:
    return np.broadcast_to(array.reshape(1, -1), (sizes.num_shards, array.size))


def _by_vocabulary(rows: Floats, sizes: Sizes) -> Floats:
    """[V, n] -> [shards, V / shards * n], zero beyond V."""
    whole = sizes.num_shards * sizes.vocab_per_shard
    padded = rows
    if whole != len(rows):
        padded = np.zeros((whole, rows.shape[1]), np.float32)
        padded[: len(rows)] = rows
    return padded.reshape(sizes.num_shards, -1)
