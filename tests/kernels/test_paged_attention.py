"""Paged attention: equal to the definition; bits independent of chunking and the batch; blind to foreign memory."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.cast_bf16.reference import bfloat16_bits
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.paged_attention import cpu, reference
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.pairwise import pairwise
from tests.seeds import rng


class Case(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def sinks(self) -> NDArray[np.float32]:
        """Of each head, from far below its scores to far above them."""
        return np.linspace(-5, 9, self.heads, dtype=np.float32) if self.has_sinks else np.zeros(0, np.float32)


CASES = [
    Case(9, 3, 64, 16, None),
    Case(4, 4, 16, 32, None),
    Case(8, 1, 24, 16, None),
    Case(2, 1, 128, 48, None),
    Case(6, 2, 32, 16, 1),
    Case(6, 2, 32, 16, 16),
    Case(6, 2, 32, 32, 37),
    Case(6, 2, 32, 16, None, 3.0),
    Case(9, 3, 64, 16, 20, 1.5),
    Case(6, 2, 32, 16, 16, None, has_sinks=True),
    Case(9, 3, 64, 16, None, None, has_sinks=True),
]


def _memory(
    generator: np.random.Generator, case: Case, num_blocks: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    shape = (num_blocks, case.kv_heads, case.block_size, case.head_dim)
    return normal(generator, *shape), normal(generator, *shape)


def _kernel(
    case: Case,
    q: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    query_starts: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    tables: NDArray[np.int32],
    *,
    in_bf16: bool = False,
) -> NDArray[np.float32]:
    padded = -(-case.head_dim // 16) * 16
    k_memory = np.zeros((len(keys), case.kv_heads, padded, case.block_size), np.float32)
    v_memory = np.zeros((len(keys), case.kv_heads, case.block_size, padded), np.float32)
    k_memory[:, :, : case.head_dim] = keys.transpose(0, 1, 3, 2)
    v_memory[..., : case.head_dim] = values
    if in_bf16:
        k_memory, v_memory = bfloat16_bits(k_memory), bfloat16_bits(v_memory)
    out = np.full((len(q), case.heads * case.head_dim), np.nan, np.float32)
    ThreadTeam(2).run(
        cpu.paged_attention, 1, q.reshape(len(q), -1), case.head_dim, np.float32(case.head_dim**-0.5),
        case.window or 0, np.float32(case.softcap or 0.0), case.sinks, cpu.attention_tasks(query_starts), query_starts,
        seq_lens, tables, k_memory, v_memory, out,
    )  # fmt: skip
    return out


def _starts(counts: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts]).astype(np.int32)


@pairwise({"case": CASES, "counts": [[1], [1, 1, 1], [16, 1, 17], [5, 40], [33, 1]]}, strength=1)
def test_equals_the_definition_and_never_reads_unwritten_memory(case: Case, counts: list[int]) -> None:
    generator = rng()
    seq_lens = np.array([n + int(generator.integers(0, 60)) for n in counts], np.int32)
    per_seq = -(-int(seq_lens.max()) // case.block_size)
    tables = generator.permutation(per_seq * len(counts)).reshape(len(counts), per_seq).astype(np.int32)
    keys, values = _memory(generator, case, tables.size + 1)
    clean = keys.copy(), values.copy()
    for b, length in enumerate(seq_lens):
        for position in range(int(length), per_seq * case.block_size):
            block, offset = tables[b, position // case.block_size], position % case.block_size
            keys[block, :, offset], values[block, :, offset] = np.nan, np.inf
    keys[-1], values[-1] = np.nan, np.nan
    q = normal(generator, sum(counts), case.heads, case.head_dim)
    starts = _starts(counts)
    out = _kernel(case, q, keys, values, starts, seq_lens, tables)
    expected = reference.paged_attention(
        q,
        *clean,
        starts,
        seq_lens,
        tables,
        case.head_dim**-0.5,
        case.window,
        case.softcap,
        case.sinks if case.has_sinks else None,
    )
    assert relative_error(out, expected.reshape(out.shape)) < 4 * TOLERANCE["float32"]


@pytest.mark.parametrize("case", CASES)
def test_a_query_has_the_same_bits_however_it_is_chunked_and_batched(case: Case) -> None:
    generator = rng()
    length, per_seq = 90, -(-90 // case.block_size)
    tables = generator.permutation(4 * per_seq).reshape(4, per_seq).astype(np.int32)
    keys, values = _memory(generator, case, tables.size)
    q = normal(generator, length, case.heads, case.head_dim)
    whole = _kernel(case, q, keys, values, _starts([length]), np.array([length], np.int32), tables[:1])
    for position in [0, 1, 15, 16, 17, 47, 48, 63, 64, 89]:
        alone = _kernel(
            case, q[position : position + 1], keys, values, _starts([1]), np.array([position + 1], np.int32), tables[:1]
        )
        assert np.array_equal(alone[0], whole[position])
    for _ in range(5):
        cuts = sorted({0, length, *generator.integers(1, length, 5).tolist()})
        at = 0
        for first, end in itertools.pairwise(cuts):
            counts = [int(generator.integers(1, 20)), end - first, int(generator.integers(1, 20))]
            others = normal(generator, sum(counts), case.heads, case.head_dim)
            others[counts[0] : counts[0] + counts[1]] = q[first:end]
            lens = np.array([counts[0] + 30, end, counts[2] + 11], np.int32)
            out = _kernel(case, others, keys, values, _starts(counts), lens, tables[[1, 0, 2]])
            assert np.array_equal(out[counts[0] : counts[0] + counts[1]], whole[first:end])
            at = end
        assert at == length


@pytest.mark.parametrize("overflows", [True, False], ids=["an overflow", "NaN"])
def test_a_score_that_is_not_finite_leaves_no_number_in_its_own_row_and_head(*, overflows: bool) -> None:
    """Not the mean of all values, which looks like an answer."""
    case, generator = CASES[0], rng()
    keys, values = _memory(generator, case, 6)
    where = _starts([5]), np.array([90], np.int32), np.arange(6, dtype=np.int32)[None]
    q = normal(generator, 5, case.heads, case.head_dim)
    expected = _kernel(case, q, keys, values, *where).reshape(q.shape)
    q[3, 4] = np.copysign(np.float32(3e38), keys[0, 4 // 3, 7]) if overflows else np.nan
    expected[3, 4] = np.nan
    np.testing.assert_array_equal(_kernel(case, q, keys, values, *where).reshape(q.shape), expected)


@pytest.mark.parametrize("case", CASES)
def test_memory_in_bfloat16_gives_the_bits_of_its_numbers_in_float32(case: Case) -> None:
    """In steps of all sizes; keys behind a sequence's end are NaN there, too."""
    generator = rng()
    for counts in ([1], [1, 1, 1], [16, 1, 17], [5, 40], [33, 1]):
        lens = np.array([n + int(generator.integers(0, 60)) for n in counts], np.int32)
        per_seq = -(-int(lens.max()) // case.block_size)
        tables = generator.permutation(per_seq * len(counts)).reshape(len(counts), per_seq).astype(np.int32)
        keys, values = _memory(generator, case, tables.size)
        for block in tables[0, lens[0] // case.block_size :][:1]:
            keys[block, :, lens[0] % case.block_size :] = np.nan
        q = normal(generator, sum(counts), case.heads, case.head_dim)
        found = _kernel(case, q, keys, values, _starts(counts), lens, tables, in_bf16=True)
        rounded = [(bfloat16_bits(part).astype(np.uint32) << 16).view(np.float32) for part in (keys, values)]
        np.testing.assert_array_equal(found, _kernel(case, q, rounded[0], rounded[1], _starts(counts), lens, tables))
        assert np.isfinite(found).all()
        assert (found != _kernel(case, q, keys, values, _starts(counts), lens, tables)).any()
