"""The decoder as one pure function in plain JAX: memory and arrays in, new memory, tokens and logits out.

Layers run under `lax.scan`: a program's size and compile time do not grow with depth. KV memory is donated, so it is
written in place; memory and tables are indexed by layer, never sliced or copied. Attention and products of experts are
`app.kernels.*.xla`; LoRA deltas are added by the kernel of `kernel_backend`. Layers may differ in their feed-forward:
arrays of a module count the layers that have it (`XlaSizes.stacked_layer`).

On several devices every shard runs the same function. q, k, v, gate and up are split on the output, o and down on the
input, with one sum over shards after each of the latter. Experts are divided among devices, and so are the columns of
each; a device computes its own pairs of tokens and experts, and one sum joins them. A LoRA delta is added before such a
sum (A of o and down is split like the input, B like the output), scales and shifts after it: adapters add no
communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from app.engine.models.linear_modules import LATENT_B, LATENT_KEYS, LATENT_VALUES, LinearModule, ModuleKind
from app.engine.models.spec import LatentSpec
from app.engine.xla.arrays import (
    EXPERT_AXIS,
    SHARD_AXES,
    TENSOR_AXIS,
    AdapterPlaces,
    KvMemory,
    RankTables,
    StepResult,
    XlaWeights,
)
from app.engine.xla.routing import PageRuns, combine, page_runs, route, sort_pairs
from app.engine.xla.sizes import XlaSizes
from app.engine.xla.step import Bucket, XlaStep, unpack
from app.kernels.mla_attention import xla as latent_attention
from app.kernels.moe_lora.xla import multiply_groups
from app.kernels.paged_attention.xla import store_and_attend, tiles_of
from app.kernels.sgmv.xla import RANK_CHUNK, Segments

#: See `app.kernels.sgmv.xla.add_deltas`.
AddDeltas = Callable[..., Array]


def forward(
    weights: XlaWeights, tables: RankTables, places: AdapterPlaces, kv: KvMemory, flat: Array, *, bucket: Bucket,
    sizes: XlaSizes, add_deltas: AddDeltas,
) -> tuple[KvMemory, StepResult]:  # fmt: skip
    """Run every layer over a packed step. With several shards, call it inside `shard_map` over `SHARD_AXES`."""
    step = unpack(flat, bucket)
    decoder = _Decoder(weights, tables, places, step, bucket, sizes, add_deltas)

    def run_layer(state: tuple[Array, KvMemory], layer: Array) -> tuple[Any, None]:
        hidden, kv = state
        attended, kv = decoder.attend(hidden, kv, layer)
        hidden = hidden + decoder.linear(attended, layer, "o")[0]
        return (hidden + decoder.feed_forward(hidden, layer), kv), None

    start = (decoder.embed(), kv)
    (hidden, kv), _ = lax.scan(run_layer, start, jnp.arange(sizes.num_layers, dtype=jnp.int32))
    logits = decoder.logits(hidden)  # [B, V]
    token_ids = jnp.argmax(logits, axis=1).astype(jnp.int32)
    top = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    return kv, StepResult(token_ids, top, logits)


class _Decoder:
    """The parts of one step."""

    def __init__(
        self, weights: XlaWeights, tables: RankTables, places: AdapterPlaces, step: XlaStep, bucket: Bucket,
        sizes: XlaSizes, add_deltas: AddDeltas,
    ) -> None:  # fmt: skip
        self._weights, self._tables, self._places, self._step = weights, tables, places, step
        self._sizes, self._add_deltas = sizes, add_deltas
        self._tiles = tiles_of(step.queries, bucket.tokens, bucket.tile)
        self._whole_heads = (sizes.attention.num_heads, sizes.attention.num_kv_heads)
        self._cos, self._sin = weights.cos[:, step.positions], weights.sin[:, step.positions]  # [ropes, T, D / 2]

    def embed(self) -> Array:
        """Token embeddings [T, H]."""
        weights, token_ids = self._weights, self._step.token_ids
        if weights.embedding is None:
            return weights.head[0, token_ids]
        return weights.embedding[token_ids]

    def attend(self, hidden: Array, kv: KvMemory, layer: Array) -> tuple[Array, KvMemory]:
        """Attention over hidden states [T, H]: [T, heads * D], and the memory with the step's keys and values."""
        layers, step = self._weights.layers, self._step
        x, latent = self._norm(hidden, layers.attention_norm[layer]), self._sizes.attention.latent
        if latent is not None:
            return self._attend_latents(x, kv, layer, latent)
        q, k, v = self.linear(x, layer, "qkv")
        q_norm, k_norm = layers.q_norm, layers.k_norm
        if self._sizes.attention.whole_qk_norm:
            q, k = self._whole_norm(q, k, q_norm[layer], k_norm[layer])
            q_norm = k_norm = None
        q, k = (self._rotate(rows, norm, layer) for rows, norm in ((q, q_norm), (k, k_norm)))
        sinks = jnp.zeros(0, jnp.float32) if layers.sinks is None else layers.sinks[layer]
        attended, keys, values = store_and_attend(
            q, k, v, *kv, step.queries, self._tiles, layer, layers.scale[layer], layers.window[layer], sinks
        )
        return attended, KvMemory(keys, values)

    def _attend_latents(self, x: Array, kv: KvMemory, layer: Array, latent: LatentSpec) -> tuple[Array, KvMemory]:
        """Latent attention (DeepSeek-AI 2024) over normed rows [T, H]: [T, heads * V], and the new memory.

        `kv_b_proj` is never applied to a latent: its rows of keys are applied to queries, those of values to sums.
        """
        layers, step, rank = self._weights.layers, self._step, latent.kv_rank
        name, narrow = "query", x
        if latent.query_rank is not None:
            name, narrow = "query_b", self.linear(x, layer, "query_a")[0]
            narrow = self._norm(narrow, layers.query_latent_norm[layer], latent.norm_eps)
        queries = self.linear(narrow, layer, name)[0].reshape(len(x), -1, self._sizes.attention.head_dim)
        own, rotated = queries[:, :, : latent.key_size], self._rotate_pairs(queries[:, :, latent.key_size :], layer)
        (rows,) = self.linear(x, layer, "latent_a")
        normed = self._norm(rows[:, :rank], layers.latent_norm[layer], latent.norm_eps)
        rows = jnp.concatenate([normed, self._rotate_pairs(rows[:, None, rank:], layer)[:, 0]], axis=1)
        attended, latents = latent_attention.store_and_attend(
            self._by_head(own, layer, latent, LATENT_KEYS), rotated, rows, kv.keys, step.queries, self._tiles, layer,
            layers.scale[layer],
        )  # fmt: skip
        return self._by_head(attended, layer, latent, LATENT_VALUES).reshape(len(x), -1), KvMemory(latents, None)

    def _by_head(self, x: Array, layer: Array, latent: LatentSpec, kind: ModuleKind) -> Array:
        """Rows by head [T, N, D] times each head's part of `kv_b_proj`, with the deltas: [T, N, columns]."""
        (target,) = LATENT_B.targets
        first = layer * self._sizes.group_size(self._sizes.absorbed[0])
        y = latent_attention.multiply_heads(x, self._weights.layers.modules[kind.name], first)
        return latent_attention.add_deltas(
            x, y, self._tables.a[target], self._tables.b[target], layer, self._step.segments, self._places.starts,
            self._places.ranks[LATENT_B.name], latent.key_size, of_keys=kind is LATENT_KEYS,
        )  # fmt: skip

    def feed_forward(self, hidden: Array, layer: Array) -> Array:
        """The layer's feed-forward [T, H] of hidden states [T, H]: dense or a mixture of experts."""
        sizes = self._sizes
        x = self._norm(hidden, self._weights.layers.mlp_norm[layer])
        dense, mixed = sizes.layers_of("gate_up"), sizes.layers_of("router")
        if not mixed:
            return self._mlp(x, layer, "gate_up", "down")
        stacked_layer = self._stacked_layer(mixed, layer)
        if not dense:
            return self._experts(x, stacked_layer)
        is_dense = jnp.array([one in dense for one in range(sizes.num_layers)])[layer]
        added: Array = lax.cond(
            is_dense,
            lambda x: self._mlp(x, self._stacked_layer(dense, layer), "gate_up", "down"),
            lambda x: self._experts(x, stacked_layer),
            x,
        )
        return added

    def logits(self, hidden: Array) -> Array:
        """Logits [B, V] of the sampled rows of hidden states [T, H]."""
        rows = self._norm(hidden[self._step.sample_rows], self._weights.final_norm)
        logits = _multiply(rows, self._weights.head[0])
        if self._sizes.num_shards > 1:
            logits = lax.all_gather(logits, SHARD_AXES, axis=1, tiled=True)
        return logits[:, : self._sizes.spec.vocab_size]

    def linear(self, x: Array, layer: Array, name: str) -> tuple[Array, ...]:
        """Apply a linear module to the whole batch, with its adapters' deltas, scales and shifts: [T, d_out] per
        target.

        layer: index among those that have the module.
        """
        layers, step, module = self._weights.layers, self._step, self._sizes.module(name)
        y = _multiply(x, layers.modules[name][layer])
        a, b = ([table[target] for target in module.targets] for table in (self._tables.a, self._tables.b))
        y = self._add_deltas(x, y, a, b, layer, step.segments, self._places.starts, self._places.ranks[name])
        if module.kind.split == "input" and self._sizes.num_shards > 1:
            y = lax.psum(y, SHARD_AXES)
        if layers.biases[name] is not None:
            y = y + layers.biases[name][layer]
        return self._columns(self._apply_extras(y, layer, module), name)

    def _experts(self, x: Array, stacked_layer: Array) -> Array:
        """Σ weight * expert(x) + gate * shared(x) of normed rows [T, H]; stacked_layer counts those with experts."""
        sizes, modules, step = self._sizes, self._weights.layers.modules, self._step
        mixture, count = sizes.mixture, sizes.experts_per_shard
        (logits,) = self.linear(x, stacked_layer, "router")
        experts, topk_weights = route(logits, mixture.router)
        mine = lax.axis_index(EXPERT_AXIS) * count if sizes.expert_shards > 1 else jnp.int32(0)
        num_slots = len(self._places.starts)
        pairs = sort_pairs(experts, topk_weights, mine, count, step.expert_slots, num_slots, step.num_tokens)
        pages = self._places.experts
        runs = None
        if pages is not None:
            first_pages = lax.dynamic_slice(pages.first_pages[stacked_layer], (mine * num_slots,), (count * num_slots,))
            runs = page_runs(pairs.keys, first_pages, len(pages.next_pages) - 1)

        def linear(x: Array, name: str) -> tuple[Array, ...]:
            y = multiply_groups(x, modules[name], stacked_layer * count, pairs.starts)
            if runs is not None:
                y = self._expert_deltas(x, y, name, runs)
            bias = self._weights.layers.biases[name]
            if bias is not None:
                expert = jnp.minimum(pairs.keys // num_slots, count - 1)  # any expert for pairs of other devices
                # Devices that share an expert add up their parts of down: only one of them adds the bias.
                is_mine = name == "experts_gate_up" or sizes.tensor_shards == 1 or lax.axis_index(TENSOR_AXIS) == 0
                y = y + jnp.where(is_mine, bias[stacked_layer * count + expert], 0)
            return self._columns(y, name)

        gate, up = linear(x[pairs.tokens], "experts_gate_up")
        out = combine(linear(self._activation(gate, up), "experts_down")[0], pairs)
        if sizes.num_shards > 1:
            out = lax.psum(out, SHARD_AXES)
        if mixture.shared is None:
            return out
        shared = self._mlp(x, stacked_layer, "shared_gate_up", "shared_down")
        if mixture.shared.is_gated:
            shared = jax.nn.sigmoid(self.linear(x, stacked_layer, "shared_gate")[0]) * shared
        return out + shared

    def _expert_deltas(self, x: Array, y: Array, name: str, runs: PageRuns) -> Array:
        """Add adapters' deltas of experts to y [P, columns] of the sorted pairs, page after page."""
        pages, tables, module = self._places.experts, self._tables.experts, self._sizes.module(name)
        assert pages is not None
        assert tables is not None
        a, b = ([table[target][None] for target in module.targets] for table in (tables.a, tables.b))
        starts = jnp.arange(len(pages.next_pages), dtype=jnp.int32) * RANK_CHUNK

        def add_page(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            y, page = state
            lines = jnp.concatenate([runs.bounds, page[:, None]], axis=1)
            segments = Segments(lines, runs.num_runs, jnp.int32(RANK_CHUNK))
            ranks = pages.ranks[name][None]
            y = self._add_deltas(x, y, a, b, jnp.int32(0), segments, starts, ranks)
            return y, pages.next_pages[page]

        added: Array = lax.fori_loop(0, self._step.most_pages, add_page, (y, runs.pages))[0]
        return added

    def _mlp(self, x: Array, stacked_layer: Array, gate_up: str, down: str) -> Array:
        """The dense feed-forward of normed rows [T, H]."""
        gate, up = self.linear(x, stacked_layer, gate_up)
        return self.linear(self._activation(gate, up), stacked_layer, down)[0]

    def _activation(self, gate: Array, up: Array) -> Array:
        """act(gate) * up, or its clamped form; see `MlpSpec`."""
        mlp = self._sizes.spec.layers[0].mlp
        if mlp.limit is not None:
            gate, up = jnp.minimum(gate, mlp.limit), jnp.clip(up, -mlp.limit, mlp.limit)
            return (up + 1) * gate * jax.nn.sigmoid(mlp.alpha * gate)
        is_gelu = mlp.activation == "gelu_tanh"
        return (jax.nn.gelu(gate, approximate=True) if is_gelu else jax.nn.silu(gate)) * up

    def _stacked_layer(self, layers: tuple[int, ...], layer: Array) -> Array:
        """A layer's index among `layers`; 0 where it is none of them."""
        indices = [layers.index(one) if one in layers else 0 for one in range(self._sizes.num_layers)]
        return jnp.array(indices, jnp.int32)[layer]

    def _columns(self, y: Array, name: str) -> tuple[Array, ...]:
        """Each target's columns of a module's output."""
        module = self._sizes.module(name)
        return tuple(y[:, module.columns(target)] for target in module.targets)

    def _apply_extras(self, y: Array, layer: Array, module: LinearModule) -> Array:
        """scale * y + shift of each row's adapter; y itself in a step without such adapters."""
        if module.name not in self._tables.scales:
            return y
        scales, shifts, rows = (
            self._tables.scales[module.name],
            self._tables.shifts[module.name],
            self._step.extra_rows,
        )

        def change(y: Array) -> Array:
            return scales[layer, rows] * y + shifts[layer, rows]

        changed: Array = lax.cond(self._step.num_extra_tokens > 0, change, lambda y: y, y)
        return changed

    def _rotate(self, rows: Array, norms: Array | None, layer: Array) -> Array:
        """Rows [T, heads * D] normalised by head (Qwen3) and rotated: half-split layout (Su et al. 2021)."""
        heads = rows.reshape(len(rows), -1, self._sizes.attention.head_dim)
        if norms is not None:
            heads = self._norm(heads, norms[layer])
        rope = self._weights.layers.rope[layer]
        cos, sin = self._cos[rope][:, None], self._sin[rope][:, None]  # [T, 1, D / 2]
        first, second = jnp.split(heads, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(rows.shape)

    def _rotate_pairs(self, x: Array, layer: Array) -> Array:
        """Rotate neighbouring pairs, not halves, of x [T, heads, E]."""
        rope = self._weights.layers.rope[layer]
        cos, sin = self._cos[rope][:, None], self._sin[rope][:, None]  # [T, 1, E / 2]
        first, second = x[..., ::2], x[..., 1::2]
        return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)

    def _whole_norm(self, q: Array, k: Array, q_norm: Array, k_norm: Array) -> tuple[Array, Array]:
        """Normalise queries [T, heads * D] and keys over all heads together (OLMoE); a shard holds some heads."""
        sizes = self._sizes
        shards, groups = sizes.num_shards, self._whole_heads
        squares = jnp.stack([(rows * rows).sum(axis=1) for rows in (q, k)])  # [2, T]
        widths = [heads * sizes.attention.head_dim for heads in groups]
        if shards > 1:
            # A KV head that several shards hold counts once.
            repeats = [max(1, shards // heads) for heads in groups]
            squares = lax.psum(squares / jnp.array(repeats, jnp.float32)[:, None], SHARD_AXES)
        factors = lax.rsqrt(squares / jnp.array(widths, jnp.float32)[:, None] + sizes.spec.norm_eps)
        return q * factors[0][:, None] * q_norm, k * factors[1][:, None] * k_norm

    def _norm(self, x: Array, weight: Array, eps: float | None = None) -> Array:
        """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019). eps: the model's if None."""
        eps = self._sizes.spec.norm_eps if eps is None else eps
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _multiply(x: Array, weights: Array) -> Array:
    """x [T, K] times weights [N, K]: [T, N]."""
    return lax.dot_general(x, weights, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
