"""A checkpoint as stacked arrays for `lax.scan`, shard by shard.

`XlaWeights` is a pytree of NumPy arrays ready to be put on devices. `app.engine.models.sharding` decides which columns
a shard holds. Weights keep the checkpoint's orientation [d_out, d_in], in float32; each shard's part of a matrix is
stored separately.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.models.linear_modules import LATENT_B, LinearModule
from app.engine.models.rope import rope_tables
from app.engine.models.sharding import shard_columns
from app.engine.models.weight_names import (
    EMBEDDING,
    FINAL_NORM,
    LATENT_NORMS,
    LM_HEAD,
    SINKS,
    LatentNorm,
    LayerNorm,
    checked_tensors,
    latent_norm_widths,
    qk_norm_widths,
)
from app.engine.xla.arrays import Floats, XlaLayers, XlaWeights
from app.engine.xla.sizes import XlaSizes

_NORMS: dict[str, LayerNorm | LatentNorm] = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    **{path: name for name, path in LATENT_NORMS.items()},
}
#: The target whose output each norm normalises.
_QK_NORMS: dict[LayerNorm, str] = {"q_norm": "q_proj", "k_norm": "k_proj"}


def read_weights(sizes: XlaSizes, tensors: Iterable[tuple[str, NDArray[Any]]], max_positions: int) -> XlaWeights:
    """Consume every tensor, as float32. Raises CheckpointError for one that has no place or is missing."""
    filling = _Filling(sizes)
    for name, stored in checked_tensors(sizes.spec, tensors):
        filling.place(name, np.asarray(stored).astype(np.float32, copy=False))
    return filling.finish(max_positions)


class _Filling:
    """The arrays while tensors are read."""

    def __init__(self, sizes: XlaSizes) -> None:
        self._sizes = sizes
        count, hidden = sizes.num_layers, sizes.spec.hidden_size
        self._columns = {module.name: shard_columns(module, sizes.shards_of(module)) for module in sizes.whole}
        self._places = {module.kind.path(target, expert): (module, target, expert) for module in sizes.modules
                        for target in module.targets for expert in module.experts
                        if module.kind is not LATENT_B}  # fmt: skip
        self._stacks, self._biases = dict[str, Floats](), dict[str, Floats | None]()
        for module in sizes.with_weights:
            matrices = len(sizes.layers_of(module.name)) * len(module.experts)
            shape = (matrices * sizes.shards_of(module), module.width(), module.d_in)
            self._stacks[module.name] = np.zeros(shape, np.float32)
            bias = np.zeros((matrices, sizes.total_width(module)), np.float32) if module.has_bias else None
            self._biases[module.name] = bias
        has_sinks, heads = sizes.attention.sinks, sizes.attention.num_heads
        self._sinks: Floats | None = np.zeros((count, heads), np.float32) if has_sinks else None
        self._norms: dict[str, Floats | None] = {
            name: np.zeros((count, hidden), np.float32) for name in ("attention_norm", "mlp_norm")
        }
        #: A norm over all heads is divided by heads; otherwise every shard has all of it.
        self._norm_parts: dict[LayerNorm | LatentNorm, NDArray[np.int64]] = {}
        for name, width in qk_norm_widths(sizes.attention).items():
            own = self._columns["qkv"][_QK_NORMS[name]].reshape(-1)
            self._norm_parts[name] = own if sizes.attention.whole_qk_norm else np.arange(width)
        for name in _QK_NORMS:
            part = self._norm_parts.get(name)
            self._norms[name] = None if part is None else np.zeros((count, len(part)), np.float32)
        widths = latent_norm_widths(sizes.attention)
        self._norms |= {
            name: np.zeros((count, widths[name]), np.float32) if name in widths else None for name in LATENT_NORMS
        }
        self._top: dict[str, Floats] = {}

    def place(self, name: str, tensor: Floats) -> None:
        """Copy "model.layers.<n>.<module>.<kind>", or a vocabulary matrix, to its place."""
        if name in (EMBEDDING, FINAL_NORM, LM_HEAD):
            self._top[name] = tensor
            return
        _, _, layer_text, rest = name.split(".", 3)
        path, kind = rest.rsplit(".", 1)
        layer = int(layer_text)
        if path in _NORMS:
            norms = self._norms[_NORMS[path]]
            assert norms is not None
            part = self._norm_parts.get(_NORMS[path])
            norms[layer] = tensor if part is None else tensor[part]
            return
        if rest == SINKS:
            assert self._sinks is not None
            self._sinks[layer] = tensor
            return
        if path == LATENT_B.path(LATENT_B.targets[0]):
            self._place_heads(layer, tensor)
            return
        module, target, expert = self._places[path]
        stacked_layer = self._sizes.stacked_layer(module.name, layer)
        mine, is_output = self._columns[module.name][target], module.kind.split == "output"
        columns = module.columns(target)
        if kind == "bias":
            bias = self._biases[module.name]
            assert bias is not None
            matrix = self._matrix(module, stacked_layer, expert)
            if is_output:
                bias[matrix].reshape(self._sizes.shards_of(module), -1)[:, columns] = tensor[mine]
            else:
                bias[matrix, columns] = tensor
            return
        for shard, part in enumerate(mine):
            matrix = self._matrix(module, stacked_layer, expert) * len(mine) + shard
            self._stacks[module.name][matrix, columns] = tensor[part] if is_output else tensor[:, part]

    def _place_heads(self, layer: int, tensor: Floats) -> None:
        """Copy kv_b_proj's rows head by head: those of keys transposed, those of values as they are."""
        attention = self._sizes.attention
        assert attention.latent is not None, "only latent attention has this module"
        key_size = attention.latent.key_size
        for head, rows in enumerate(tensor.reshape(attention.num_heads, -1, attention.latent.kv_rank)):
            for module, part in zip(self._sizes.absorbed, (rows[:key_size].T, rows[key_size:]), strict=True):
                self._stacks[module.name][self._matrix(module, layer, head)] = part

    def _matrix(self, module: LinearModule, stacked_layer: int, expert: int | None) -> int:
        """A matrix's index in its module's stack: expert shards, then layers, then experts of a shard; or heads."""
        if expert is None:
            return stacked_layer
        count = self._sizes.group_size(module)
        layers = len(self._sizes.layers_of(module.name))
        return (expert // count * layers + stacked_layer) * count + expert % count

    def finish(self, max_positions: int) -> XlaWeights:
        """The finished weights."""
        spec, shards = self._sizes.spec, self._sizes.num_shards
        attentions = [layer.attention for layer in spec.layers]
        ropes = rope_tables(spec, max_positions)
        modules = {
            module.name: _join_shards(
                self._stacks[module.name], self._sizes.shards_of(module), module.kind.split == "input"
            )
            for module in self._sizes.with_weights
        }
        layers = XlaLayers(
            modules, self._biases, **self._norms,
            rope=ropes.layer_rope.astype(np.int32),
            window=np.array([attention.window or 0 for attention in attentions], np.int32),
            scale=np.array([attention.scale for attention in attentions], np.float32),
            sinks=self._sinks,
        )  # fmt: skip
        return XlaWeights(
            embedding=None if spec.tie_embeddings and shards == 1 else self._top[EMBEDDING],
            head=self._head(self._top[EMBEDDING if spec.tie_embeddings else LM_HEAD]),
            final_norm=self._top[FINAL_NORM],
            cos=ropes.cos,
            sin=ropes.sin,
            layers=layers,
        )

    def _head(self, rows: Floats) -> Floats:
        """[V, H] -> [1, shards * columns, H], zeros beyond V."""
        padded = np.zeros((1, self._sizes.num_shards * self._sizes.vocab_per_shard, rows.shape[1]), np.float32)
        padded[0, : len(rows)] = rows
        return padded


def _join_shards(stack: Floats, num_shards: int, splits_input: bool) -> Floats:
    """[L * shards, columns, d_in] -> [L, shards * columns, d_in], or [L, columns, shards * d_in]."""
    _, columns, depth = stack.shape
    if not splits_input:
        return stack.reshape(-1, num_shards * columns, depth)
    split = stack.reshape(-1, num_shards, columns, depth)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(-1, columns, num_shards * depth)
