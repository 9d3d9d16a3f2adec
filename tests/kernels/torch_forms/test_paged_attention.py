"""Attention in plain torch: the definition's in both modes, and in deterministic mode a query's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.kernels.paged_attention import reference
from tests.engine.cuda.exact_operations import ExactOperations
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.kernels.torch_forms import fixed_order
from tests.kernels.torch_forms.paged_attention import paged_attention
from tests.pairwise import pairwise
from tests.seeds import rng

HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCKS = 6, 2, 24, 16, 12


def _attend(
    q: torch.Tensor, memory: tuple[torch.Tensor, torch.Tensor], starts: list[int], lens: list[int],
    tables: np.ndarray, *, window: int | None = None, softcap: float | None = None, batch_invariant: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Into memory full of NaN."""
    out = torch.full_like(q, torch.nan)
    paged_attention(
        q, *memory, torch.tensor(starts), torch.tensor(lens), torch.from_numpy(tables), out, scale=DIM**-0.5,
        max_query_len=0, max_seq_len=0, window=window, softcap=softcap, batch_invariant=batch_invariant,
    )  # fmt: skip
    return out


def _memory() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (BLOCKS, KV_HEADS, BLOCK_SIZE, DIM)
    return torch.from_numpy(normal(rng(), *shape)), torch.from_numpy(normal(rng(), *shape))


@pairwise(
    {
        "batch_invariant": [False, True],
        "window, softcap": [(None, None), (1, None), (9, 5.0), (None, 3.0)],
        "counts": [[], [1], [1, 1, 1], [33, 1, 0, 5]],
    }
)
def test_equals_the_definition(
    counts: list[int], window: int | None, softcap: float | None, batch_invariant: bool
) -> None:
    generator, memory = rng(), _memory()
    lens = [count + int(generator.integers(0, 48 - count)) if count else 0 for count in counts]
    tables = generator.permutation(BLOCKS)[: 3 * len(counts)].reshape(len(counts), 3).astype(np.int32)
    for cache in memory:  # what no query sees
        for table, length in zip(tables.tolist(), lens, strict=True):
            for position in range(length, 3 * BLOCK_SIZE):
                cache[table[position // BLOCK_SIZE], :, position % BLOCK_SIZE] = torch.nan
    starts = np.cumsum([0, *counts]).astype(np.int32)
    q = torch.from_numpy(normal(generator, sum(counts), HEADS, DIM))
    out = _attend(
        q, memory, starts.tolist(), lens, tables, window=window, softcap=softcap, batch_invariant=batch_invariant
    )
    clean = (np.nan_to_num(cache.double().numpy()) for cache in memory)
    expected = reference.paged_attention(
        q.double().numpy(), *clean, starts, np.array(lens, np.int32), tables, DIM**-0.5, window, softcap
    )
    assert relative_error(out.numpy(), expected) < TOLERANCE["float32"]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("most_terms", [1, 40_000, fixed_order.MOST_TERMS])
def test_a_query_has_the_same_bits_however_it_is_chunked_and_batched(
    window: int | None, most_terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.kernels.torch_forms.paged_attention.MOST_TERMS", most_terms)
    generator, memory, length = rng(), _memory(), 45
    tables = generator.permutation(BLOCKS)[:6].reshape(2, 3).astype(np.int32)
    q = torch.from_numpy(normal(generator, length, HEADS, DIM))
    with ExactOperations():
        whole = _attend(q, memory, [0, length], [length], tables[:1], window=window)
    for position in range(length):
        alone = _attend(q[position : position + 1], memory, [0, 1], [position + 1], tables[:1], window=window)
        assert torch.equal(alone[0], whole[position]), position
    cut = int(generator.integers(1, length))
    both = torch.cat([q[:9], q[cut:]])
    out = _attend(both, memory, [0, 9, 9 + length - cut], [30, length], tables[::-1].copy(), window=window)
    assert torch.equal(out[9:], whole[cut:])
