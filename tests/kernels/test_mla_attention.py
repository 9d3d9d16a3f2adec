"""Latent attention: equal to heads whose keys and values are written out; bits independent of chunks and the batch."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.cast_bf16.reference import bfloat16_bits
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.mla_attention import cpu, reference, xla
from app.kernels.paged_attention.cpu import attention_tasks
from app.kernels.paged_attention.xla import Queries, tiles_of
from app.kernels.sgmv.xla import Segments
from tests.kernels.cases import normal, relative_error
from tests.seeds import rng

RANK, OWN, TURNED, VALUE, BLOCK = 32, 16, 6, 16, 32
Floats = NDArray[np.float32]


class Sequence(NamedTuple):
    """One sequence's queries [T, N, P + E] and latents [T, R + E], before rotation; table: its blocks."""

    queries: Floats
    latents: Floats
    table: NDArray[np.int32]


def _made(generator: np.random.Generator, num_heads: int, length: int, blocks: NDArray[np.int64]) -> Sequence:
    queries, latents = normal(generator, length, num_heads, OWN + TURNED), normal(generator, length, RANK + TURNED)
    return Sequence(queries, latents, blocks.astype(np.int32))


def _angles(generator: np.random.Generator) -> tuple[Floats, Floats]:
    angles = generator.uniform(-3, 3, (200, TURNED // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _step(
    pieces: list[tuple[Sequence, int, int]], keys: Floats, rope: tuple[Floats, Floats], memory: NDArray[Any],
    scale: float,
) -> list[Floats]:  # fmt: skip
    """Tokens [first, end) of each sequence in one step; per piece the heads' sums of latents [end - first, N, R]."""
    num_heads = len(keys)
    counts = [end - first for _, first, end in pieces]
    starts, num_tokens = np.cumsum([0, *counts]).astype(np.int32), sum(counts)
    queries = np.full((num_tokens, -(-num_heads * (OWN + TURNED) // 16) * 16), np.nan, np.float32)
    flat = np.concatenate([one.queries[first:end] for one, first, end in pieces])
    queries[:, : num_heads * (OWN + TURNED)] = flat.reshape(num_tokens, -1)
    latents = np.full((num_tokens, 48), np.nan, np.float32)
    latents[:, : RANK + TURNED] = np.concatenate([one.latents[first:end] for one, first, end in pieces])
    positions = np.concatenate([np.arange(first, end) for _, first, end in pieces]).astype(np.int32)
    slots = np.concatenate(
        [one.table[np.arange(f, e) // BLOCK] * BLOCK + np.arange(f, e) % BLOCK for one, f, e in pieces]
    ).astype(np.int64)
    own, team = np.full((num_heads * num_tokens, OWN), np.nan, np.float32), ThreadTeam(2)
    team.run(cpu.rotate_and_store, 1, queries, latents, positions, slots, *rope, num_heads, OWN, RANK, memory, own)
    # Row by row, so that these bits do not depend on the step.
    absorbed = np.stack([own[i] @ keys[i // num_tokens] for i in range(len(own))])
    lens = np.array([end for _, _, end in pieces], np.int32)
    tables = np.stack([one.table for one, _, _ in pieces])
    team.run(
        cpu.latent_attention, 1, queries, absorbed, num_heads, OWN, TURNED, np.float32(scale), attention_tasks(starts),
        starts, lens, tables, memory,
    )  # fmt: skip
    team.close()
    by_token = absorbed.reshape(num_heads, num_tokens, RANK).transpose(1, 0, 2)
    return [by_token[a:b] for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("num_heads", [3, 16, 20])
def test_equal_to_the_definition_in_one_piece_and_in_chunks_beside_others(num_heads: int, in_bf16: bool) -> None:
    generator = rng()
    rope, scale, length = _angles(generator), 0.2, 90
    keys, values = normal(generator, num_heads, OWN, RANK), normal(generator, num_heads, VALUE, RANK)
    blocks = generator.permutation(12).reshape(4, 3)
    mine, other = _made(generator, num_heads, length, blocks[0]), _made(generator, num_heads, length, blocks[1])
    memory: NDArray[Any] = np.full((12, 1, BLOCK, 48), np.nan, np.float32)
    (whole,) = _step([(mine, 0, length)], keys, rope, memory, scale)
    latents, turned = (
        mine.latents[:, :RANK],
        reference.rotate_neighbours(mine.latents[:, RANK:], *(part[:length] for part in rope)),
    )
    if in_bf16:
        wide, memory = memory, bfloat16_bits(np.full_like(memory, np.nan))
        (whole,) = _step([(mine, 0, length)], keys, rope, memory, scale)
        np.testing.assert_array_equal(memory, bfloat16_bits(wide))
        rows = memory[blocks[0], 0].reshape(-1, 48)[:length].astype(np.uint32) << 16
        latents, turned = np.split(rows.view(np.float32)[:, : RANK + TURNED], [RANK], axis=1)
    heads = [part[:length, None] for part in rope]
    queries = np.concatenate(
        [mine.queries[..., :OWN], reference.rotate_neighbours(mine.queries[..., OWN:], *heads)], axis=2
    )
    expected = reference.latent_attention(queries, latents, turned, keys, values, scale)
    found = np.einsum("tnr,nvr->tnv", whole.astype(np.float64), values)
    assert relative_error(found, expected) < 4e-6  # float32: 60 draws had 0.9e-6 in the middle and 1.8e-6 at most

    fresh, at = mine._replace(table=blocks[2].astype(np.int32)), 0
    for end in (1, 2, 16, 17, 50, 66, length):
        piece, _ = _step([(fresh, at, end), (other, at, end)], keys, rope, memory, scale)
        assert np.array_equal(piece, whole[at:end]), (at, end)
        at = end


def test_programs_equal_the_definition_and_store_what_is_new() -> None:
    """Two sequences with 40 and 5 keys of which 20 and 1 are new, beside padding, in the second of two layers."""
    generator, num_heads, scale, padded = rng(), 3, 0.2, 24
    keys, values = normal(generator, num_heads, OWN, RANK), normal(generator, num_heads, VALUE, RANK)
    lengths, counts = (40, 5), (20, 1)
    latents = [normal(generator, length, RANK + TURNED) for length in lengths]
    queries = [normal(generator, length, num_heads, OWN + TURNED) for length in lengths]
    tables = np.zeros((8, 8), np.int32)
    tables[:2, :2] = generator.permutation(4).reshape(2, 2)
    memory = np.full((2, 5, 1, BLOCK, RANK + TURNED), np.nan, np.float32)
    slots = np.full(padded, 5 * BLOCK, np.int32)
    at = 0
    for table, own, count in zip(tables, latents, counts, strict=False):
        for position, row in enumerate(own):
            block, offset = table[position // BLOCK], position % BLOCK
            if position < len(own) - count:
                memory[1, block, 0, offset] = row
            else:
                slots[at] = block * BLOCK + offset
                at += 1
    new = [np.concatenate([one[-n:] for one, n in zip(part, counts, strict=True)]) for part in (queries, latents)]
    q, rows = (np.concatenate([one, np.full((padded - at, *one.shape[1:]), np.nan, np.float32)]) for one in new)
    tasks, starts = np.array([[0, 0], [0, 16], [1, 0], [0, 0]], np.int32), np.array([0, 20, 21], np.int32)
    step = Queries(
        jnp.array(slots), jnp.array(tasks), jnp.int32(3), jnp.array(starts), jnp.array(lengths, jnp.int32),
        jnp.array(tables),
    )  # fmt: skip

    @jax.jit
    def run(absorbed: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer, turned, number = jnp.int32(1), jnp.array(q[..., OWN:]), jnp.float32(scale)
        tiles = tiles_of(step, padded, 16)
        return xla.store_and_attend(absorbed, turned, jnp.array(rows), memory, step, tiles, layer, number)

    attended, after = map(np.asarray, run(jnp.array(np.einsum("tnp,npr->tnr", q[..., :OWN], keys)), memory))
    found = np.einsum("tnr,nvr->tnv", attended.astype(np.float64), values)
    first = 0
    for table, own, of_query, count in zip(tables, latents, queries, counts, strict=False):
        wanted = reference.latent_attention(of_query, own[:, :RANK], own[:, RANK:], keys, values, scale)[-count:]
        assert relative_error(found[first : first + count], wanted) < 4e-6
        places = np.arange(len(own))
        np.testing.assert_array_equal(after[1, table[places // BLOCK], 0, places % BLOCK], own)
        first += count


@pytest.mark.parametrize("of_keys", [True, False])
def test_deltas_of_heads_are_those_of_the_whole_module(of_keys: bool) -> None:
    """Adapters of rank 3 and 11 and the base in one step: what the module's delta does to a latent, on either side."""
    generator, num_heads, runs = rng(), 3, ((0, 11, 2), (12, 14, 1))
    a, b = normal(generator, 2, 40, RANK), normal(generator, 2, 40, num_heads * (OWN + VALUE))
    starts, ranks = np.array([0, 24, 8], np.int32), np.zeros((2, 3, 1), np.int32)
    ranks[1, 1:, 0] = 3, 11
    a[1, 27:32], a[1, 19:24] = 0, 0
    lines = np.array([(0, 8, 2), (8, 11, 2), (12, 14, 1), (0, 0, 0)], np.int32)
    segments = Segments(jnp.array(lines), jnp.int32(3), jnp.int32(11))
    x = normal(generator, 16, num_heads, OWN if of_keys else RANK)
    y = normal(generator, 16, num_heads, RANK if of_keys else VALUE)
    given = [jnp.array(array) for array in (a, b, starts, ranks)]

    @jax.jit
    def run(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array, starts: jax.Array, ranks: jax.Array) -> jax.Array:
        return xla.add_deltas(x, y, a, b, jnp.int32(1), segments, starts, ranks, OWN, of_keys=of_keys)

    expected = y.astype(np.float64)
    for first, end, adapter in runs:
        own = slice(starts[adapter], starts[adapter] + ranks[1, adapter, 0])
        delta = (b[1, own].T.astype(np.float64) @ a[1, own]).reshape(num_heads, -1, RANK)  # kv_b_proj's, by head
        part = delta[:, :OWN].swapaxes(1, 2) if of_keys else delta[:, OWN:]
        expected[first:end] += np.einsum("tnd,nwd->tnw", x[first:end], part)
    assert relative_error(np.asarray(run(jnp.array(x), jnp.array(y), *given)), expected) < 2e-6
