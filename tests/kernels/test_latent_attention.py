"""Latent attention: equal to heads whose keys and values are written out; bits independent of chunks and company."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.latent_attention import cpu, reference
from app.kernels.machine.team import Team
from app.kernels.paged_attention.cpu import attention_tasks
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
    pieces: list[tuple[Sequence, int, int]], keys: Floats, rope: tuple[Floats, Floats], memory: Floats, scale: float
) -> list[Floats]:
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
    own, team = np.full((num_heads * num_tokens, OWN), np.nan, np.float32), Team(2)
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


@pytest.mark.parametrize("num_heads", [3, 16, 20])
def test_equal_to_the_definition_in_one_piece_and_in_chunks_beside_others(num_heads: int) -> None:
    generator = rng()
    rope, scale, length = _angles(generator), 0.2, 90
    keys, values = normal(generator, num_heads, OWN, RANK), normal(generator, num_heads, VALUE, RANK)
    blocks = generator.permutation(12).reshape(4, 3)
    mine, other = _made(generator, num_heads, length, blocks[0]), _made(generator, num_heads, length, blocks[1])
    memory = np.full((12, 1, BLOCK, 48), np.nan, np.float32)
    (whole,) = _step([(mine, 0, length)], keys, rope, memory, scale)

    turned = [reference.rotate_neighbours(x, *(part[:length] for part in rope)) for x in (mine.latents[:, RANK:],)]
    heads = [part[:length, None] for part in rope]
    queries = np.concatenate(
        [mine.queries[..., :OWN], reference.rotate_neighbours(mine.queries[..., OWN:], *heads)], axis=2
    )
    expected = reference.latent_attention(queries, mine.latents[:, :RANK], turned[0], keys, values, scale)
    found = np.einsum("tnr,nvr->tnv", whole.astype(np.float64), values)
    assert relative_error(found, expected) < 2e-6

    fresh, at = mine._replace(table=blocks[2].astype(np.int32)), 0
    for end in (1, 2, 16, 17, 50, 66, length):
        piece, _ = _step([(fresh, at, end), (other, at, end)], keys, rope, memory, scale)
        assert np.array_equal(piece, whole[at:end]), (at, end)
        at = end
