"""What adapters do to their own rows beside low-rank deltas, in XLA.

In: what the base's operation gave for the whole batch, the segments of tokens whose adapters have such extras, and one
flat memory in which their arrays lie. Out: the same with those tokens' rows changed; rows of others are not touched.
Loops have dynamic ends and shapes are fixed: adapters come and go without recompiling, a step without such tokens runs
no body, and a row's result does not depend on its company. What can be computed once (scales, shifts) has been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from app.kernels.sgmv.xla import RANK_CHUNK, SEGMENT_TOKENS

#: Last axis of `OwnTables.modules`.
WEIGHT, SCALE, SHIFT = range(3)
#: Last axis of `OwnTables.slots`: places, then how many there are of something.
FINAL_NORM, EMBED_ROWS, EMBED_A, EMBED_B, HEAD_WEIGHT, HEAD_ROWS, HEAD_IDS, HEAD_A, HEAD_B = range(9)
NUM_PLACES = 9
EMBED_RANK, NUM_HEAD_IDS, HEAD_RANK = range(NUM_PLACES, 12)
#: Outputs of an own matrix, and token rows, that are multiplied at a time.
_OUTPUTS, _TOKEN_ROWS = 128, 32


class OwnTables(NamedTuple):
    """Where adapters' arrays begin in memory [N] float32; 0, where nothing begins, for none.

    modules: [L, S, 7, 3]: own weight [d_out, d_in], scale and shift [d_out]. norms: [L, S, 4], as in `cpu`: of [H],
    or of [head_dim]. slots: [S, 12]: final norm [H]; embedding rows [., H] (where a token's lies is the host's to find)
    and delta a [V, r], b [r, H]; own head [V, H]; head's token rows [n, H] and their ids [n] (as floats, exact below
    2^24); head delta a [r, H], b [r, V]. With shards d_out, d_in and the head's V are one shard's, and so is memory.
    """

    memory: Array
    modules: Array
    norms: Array
    slots: Array


class OwnSegments(NamedTuple):
    """Up to `SEGMENT_TOKENS` consecutive rows of one adapter with extras each: [G] int32, `num_segments` are real."""

    num_segments: Array
    starts: Array
    lengths: Array
    adapter_slots: Array


def read_beyond(hidden: int, vocab: int, widest: int) -> int:
    """Floats after an array's end that may be read, and cut off again. widest: of the modules' inputs and outputs."""
    return max(_TOKEN_ROWS * hidden, RANK_CHUNK * max(vocab, hidden), _OUTPUTS * widest)


def own_segments(runs: NDArray[np.int64], out: NDArray[np.int32]) -> int:
    """Fill out [3, G] (starts, lengths, adapter slots) from runs [E, 3] (first row, end, adapter slot); returns their
    number."""
    count = 0
    for first, end, adapter_slot in runs.tolist():
        starts = np.arange(first, end, SEGMENT_TOKENS)
        part = slice(count, count + len(starts))
        out[0, part], out[1, part], out[2, part] = starts, np.minimum(end - starts, SEGMENT_TOKENS), adapter_slot
        count += len(starts)
    return count


def own_norm(
    x: Array, normed: Array, weight: Array, memory: Array, places: Array, segments: OwnSegments,
    norm: Callable[[Array, Array], Array],
) -> Array:  # fmt: skip
    """normed, with norm(x[t], own weight) where the adapter has one. x, normed: [T, ..., W]; places: [S]."""

    def change(adapter_slot: Array, start: Array, before: Array) -> Array:
        return norm(_rows(x, start, before), _vector(memory, places[adapter_slot], weight))

    return _for_each(segments, normed, change)


def own_modules(
    x: Array, y: Array, own: OwnTables, layer: Array, modules: Sequence[int], out_sizes: Sequence[int],
    segments: OwnSegments,
) -> Array:  # fmt: skip
    """scale * y + shift for the modules of the adapters that have any of it, y with W x[t] where they bring W.

    x: [T, d_in]. y: [T, sum(out_sizes)], the products of `modules` side by side.
    """
    bounds = np.cumsum([0, *out_sizes]).tolist()

    def change(adapter_slot: Array, start: Array, before: Array) -> Array:
        x_rows, places = _rows(x, start, before), own.modules[layer, adapter_slot]
        parts = [
            _own_product(x_rows, own.memory, places[module, WEIGHT], before[:, low:high])
            for module, (low, high) in zip(modules, pairwise(bounds), strict=True)
        ]
        scales, shifts = (
            jnp.concatenate(
                [
                    _vector(own.memory, places[module, kind], jnp.full(size, default, jnp.float32))
                    for module, size in zip(modules, out_sizes, strict=True)
                ]
            )
            for kind, default in ((SCALE, 1.0), (SHIFT, 0.0))
        )
        # A loop of its own, run once or never: in one expression the product and the sum are rounded once, in steps of
        # some shapes, and a row's bits would depend on its company.
        has_scale = (places[jnp.array(modules), SCALE] > 0).any()
        y = lax.fori_loop(0, has_scale.astype(jnp.int32), lambda _, y: y * scales, jnp.concatenate(parts, axis=1))
        return y + shifts

    return _for_each(segments, y, change)


def own_embedding(rows: Array, token_ids: Array, places: Array, own: OwnTables, segments: OwnSegments) -> Array:
    """rows [T, H], with the adapter's own row where places [T] has one, plus its low-rank delta."""
    hidden = rows.shape[1]

    def change(adapter_slot: Array, start: Array, before: Array) -> Array:
        at = _rows(places, start, before)
        out = jnp.where(at[:, None] > 0, _slices(own.memory, at, hidden), before)
        a, b, rank = (own.slots[adapter_slot, kind] for kind in (EMBED_A, EMBED_B, EMBED_RANK))
        factors_at = a + _rows(token_ids, start, before) * rank

        def chunk(number: Array, delta: Array) -> Array:
            factors = _slices(own.memory, factors_at + number * RANK_CHUNK, RANK_CHUNK)
            return delta + _expanded(factors, own.memory, b, number, rank, hidden)

        return out + lax.fori_loop(0, _num_chunks(rank), chunk, jnp.zeros_like(out))

    return _for_each(segments, rows, change)


def own_logits(x: Array, logits: Array, own: OwnTables, first_column: Array | int, segments: OwnSegments) -> Array:
    """logits [P, V], from the adapter's own head or rows of it, plus its low-rank delta. x: [P, H], normalised.

    first_column: the token of this shard's first logit.
    """
    hidden, width, memory = x.shape[1], logits.shape[1], own.memory

    def change(adapter_slot: Array, start: Array, before: Array) -> Array:
        x_rows, slot = _rows(x, start, before), own.slots[adapter_slot]

        def token_rows(number: Array, out: Array) -> Array:
            first = number * _TOKEN_ROWS
            weight = _slice(memory, slot[HEAD_ROWS] + first * hidden, _TOKEN_ROWS * hidden).reshape(-1, hidden)
            columns = _slice(memory, slot[HEAD_IDS] + first, _TOKEN_ROWS).astype(jnp.int32) - first_column
            is_mine = (jnp.arange(_TOKEN_ROWS) + first < slot[NUM_HEAD_IDS]) & (columns >= 0)
            return out.at[:, jnp.where(is_mine, columns, width)].set(_matmul(x_rows, weight), mode="drop")

        def chunk(number: Array, delta: Array) -> Array:
            a_rows = _slice(memory, slot[HEAD_A] + number * RANK_CHUNK * hidden, RANK_CHUNK * hidden)
            factors = _matmul(x_rows, a_rows.reshape(-1, hidden))
            return delta + _expanded(factors, memory, slot[HEAD_B], number, slot[HEAD_RANK], width)

        out = _own_product(x_rows, memory, slot[HEAD_WEIGHT], before)
        out = lax.fori_loop(0, -(-slot[NUM_HEAD_IDS] // _TOKEN_ROWS), token_rows, out)
        return out + lax.fori_loop(0, _num_chunks(slot[HEAD_RANK]), chunk, jnp.zeros_like(out))

    return _for_each(segments, logits, change)


def squared_norms(
    weight: Array, a: Array, b: Array, layer: Array, row_start: Array, num_chunks: Array, out_sizes: Sequence[int]
) -> Array:
    """The squared norms [sum(out_sizes)] of the rows of W + B A, for the modules of one product: for DoRA's scales.

    weight: [L, sum(out_sizes), d_in]; a, b: tables of rank rows, as in `app.kernels.sgmv.xla.add_deltas`.
    """
    d_in, bounds = weight.shape[2], np.cumsum([0, *out_sizes]).tolist()
    found = []
    for module, (low, high) in enumerate(pairwise(bounds)):

        def chunk(number: Array, total: Array, module: int = module, low: int = low, size: int = high - low) -> Array:
            row = row_start + number * RANK_CHUNK
            a_rows = lax.dynamic_slice(a, (layer, row, module * d_in), (1, RANK_CHUNK, d_in))[0]
            b_rows = lax.dynamic_slice(b, (layer, row, low), (1, RANK_CHUNK, size))[0]
            return total + _product(b_rows, a_rows, 0, 0)

        rows = lax.fori_loop(0, num_chunks, chunk, weight[layer, low:high])
        found.append(jnp.sum(rows * rows, axis=1))
    return jnp.concatenate(found)


def _for_each(segments: OwnSegments, out: Array, change: Callable[[Array, Array, Array], Array]) -> Array:
    """out [T, ...] with the rows of every segment replaced: change(adapter slot, first row of a tile, its rows)."""
    num_rows = out.shape[0]
    tile = min(SEGMENT_TOKENS, num_rows)

    def one(index: Array, out: Array) -> Array:
        wanted = segments.starts[index]
        start = jnp.minimum(wanted, num_rows - tile)
        before = lax.dynamic_slice_in_dim(out, start, tile)
        row = start + jnp.arange(tile, dtype=jnp.int32)
        mine = (row >= wanted) & (row < wanted + segments.lengths[index])
        after = change(segments.adapter_slots[index], start, before)
        kept = jnp.where(mine.reshape(-1, *(1,) * (out.ndim - 1)), after, before)
        return lax.dynamic_update_slice_in_dim(out, kept, start, 0)

    return lax.fori_loop(0, segments.num_segments, one, out)


def _own_product(x: Array, memory: Array, place: Array, before: Array) -> Array:
    """x [t, d_in] times the weight [W, d_in] at `place`, or before [t, W] where there is none."""
    d_in, width = x.shape[1], before.shape[1]
    size = min(_OUTPUTS, width)

    def piece(number: Array, out: Array) -> Array:
        first = jnp.minimum(number * size, width - size)
        weight = _slice(memory, place + first * d_in, size * d_in).reshape(size, d_in)
        return lax.dynamic_update_slice(out, _matmul(x, weight), (0, first))

    return lax.fori_loop(0, jnp.where(place > 0, -(-width // size), 0), piece, before)


def _expanded(factors: Array, memory: Array, b: Array, number: Array, rank: Array, width: int) -> Array:
    """factors [t, RANK_CHUNK] times chunk `number` of the rows [rank, width] at `b`."""
    first = number * RANK_CHUNK
    is_row = jnp.arange(RANK_CHUNK) + first < rank
    rows = _slice(memory, b + first * width, RANK_CHUNK * width).reshape(RANK_CHUNK, width)
    return _product(jnp.where(is_row, factors, 0), jnp.where(is_row[:, None], rows, 0), 1, 0)


def _num_chunks(rank: Array) -> Array:
    return -(-rank // RANK_CHUNK)


def _rows(array: Array, start: Array, like: Array) -> Array:
    return lax.dynamic_slice_in_dim(array, start, like.shape[0])


def _vector(memory: Array, place: Array, default: Array) -> Array:
    return jnp.where(place > 0, _slice(memory, place, default.shape[0]), default)


def _slice(memory: Array, place: Array, size: int) -> Array:
    return lax.dynamic_slice(memory, (place,), (size,))


def _slices(memory: Array, places: Array, size: int) -> Array:
    """[t] -> [t, size]."""
    rows: Array = jax.vmap(lambda place: _slice(memory, place, size))(places)
    return rows


def _matmul(x: Array, w: Array) -> Array:
    """x: [T, d_in], w: [d_out, d_in]."""
    return _product(x, w, 1, 1)


def _product(x: Array, y: Array, contract_x: int, contract_y: int) -> Array:
    return lax.dot_general(x, y, (((contract_x,), (contract_y,)), ((), ())), precision=lax.Precision.HIGHEST)
