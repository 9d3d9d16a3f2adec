"""LoRA of experts on the GPU: equal to the mixture's definition, deltas before the activation; nothing leaks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from app.kernels.moe_lora import reference, triton
from app.kernels.rank_rows import RankRows
from tests.kernels.cases import normal
from tests.kernels.tensors import DEVICE, DTYPES, TOLERANCE, error, numpy, tensor
from tests.seeds import rng

HIDDEN, INNER, EXPERTS, CHOICES, SLOTS, MAX_RANK = 40, 24, 4, 2, 5, 20


class Paged(NamedTuple):
    """One product's tables: what the reference gets and what the kernel gets."""

    arrays: reference.ExpertRows
    rows: RankRows


def paged(generator: np.random.Generator, depth: int, widths: tuple[int, ...], dtype: torch.dtype) -> Paged:
    """Adapters with a rank per expert, some experts and slices left alone; rows nobody owns are NaN."""
    ranks = generator.choice([0, 1, 5, 16, MAX_RANK], (SLOTS, EXPERTS, 1)).repeat(len(widths), axis=2)
    ranks[generator.random(ranks.shape) < 0.2] = 0
    ranks[0] = 0
    ends = np.cumsum(ranks.max(axis=2) + 3)
    row_starts = (ends - ranks.max(axis=2).flatten()).reshape(SLOTS, EXPERTS)
    row_starts[0] = 0
    a, b = np.full((len(widths), ends[-1], depth), np.nan), np.full((ends[-1], sum(widths)), np.nan)
    bounds = np.cumsum([0, *widths])
    for adapter, expert, n in np.ndindex(ranks.shape):
        rank = int(ranks[adapter, expert, n])
        rows = slice(row_starts[adapter, expert], row_starts[adapter, expert] + rank)
        a[n, rows] = normal(generator, rank, depth) / depth**0.5
        b[rows, bounds[n] : bounds[n + 1]] = normal(generator, rank, widths[n]) / max(rank, 1) ** 0.5
    tensors = tensor(a, dtype), tensor(b, dtype)
    clean = (np.nan_to_num(numpy(t)) for t in tensors)
    return Paged(
        reference.ExpertRows(*clean, widths, row_starts, ranks),
        RankRows(*tensors, widths, tensor(row_starts.astype(np.int32)), tensor(ranks.astype(np.int32))),
    )


def silu(gate: NDArray[np.float64]) -> NDArray[np.float64]:
    return gate / (1 + np.exp(-gate))


@pytest.mark.parametrize(("grouped", "deterministic"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("slots", [[], [0, 0, 0], [3], [2] * 11, [1, 2, 3, 4, 0, 4, 1, 4, 2]])
def test_equals_the_mixture(slots: list[int], grouped: bool, deterministic: bool) -> None:
    """The base products are torch's here, in float32, and rounded once, like the kernels' own output."""
    generator, num_tokens = rng(), len(slots)
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    first, second = paged(generator, HIDDEN, (INNER, INNER), dtype), paged(generator, INNER, (HIDDEN,), dtype)
    x = tensor(normal(generator, num_tokens, HIDDEN), dtype)
    gate_up = tensor(normal(generator, EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5, dtype)
    down = tensor(normal(generator, EXPERTS, HIDDEN, INNER) / INNER**0.5, dtype)
    experts = np.array([generator.permutation(EXPERTS)[:CHOICES] for _ in slots], np.int64).reshape(-1, CHOICES)
    weights = generator.random((num_tokens, CHOICES)).astype(np.float32)
    arguments = {"max_rank": MAX_RANK, "grouped": grouped, "deterministic": deterministic}
    on_device = tensor(np.array(slots, np.int32)), tensor(experts)

    of_pair = on_device[1].flatten()
    x_of_pair = x.repeat_interleave(CHOICES, 0).float()
    both = torch.einsum("ph,pih->pi", x_of_pair, gate_up.float()[of_pair]).to(dtype)
    before = both.clone()
    triton.add_lora(x, both, first.rows, *on_device, per_pair=False, **arguments)
    untouched = (first.arrays.ranks[np.repeat(slots, CHOICES).astype(int), experts.flatten()] == 0).all(axis=1)
    assert torch.equal(both[torch.from_numpy(untouched).to(DEVICE)], before[torch.from_numpy(untouched).to(DEVICE)])
    gate, up = both.float().chunk(2, dim=1)
    hidden = (torch.nn.functional.silu(gate) * up).to(dtype)
    pairs = torch.einsum("pi,phi->ph", hidden.float(), down.float()[of_pair]).to(dtype)
    triton.add_lora(hidden, pairs, second.rows, *on_device, per_pair=True, **arguments)
    out = (pairs.float().view(num_tokens, CHOICES, HIDDEN) * tensor(weights)[:, :, None]).sum(1)

    expected = reference.mixture(
        numpy(x), numpy(gate_up), numpy(down), experts, weights, np.array(slots, np.int32), first.arrays,
        second.arrays, silu,
    )  # fmt: skip
    assert error(out, expected) < TOLERANCE[dtype], dtype


@pytest.mark.usefixtures("rows_of_products_alike")
def test_a_pair_has_the_same_bits_alone_and_in_any_batch() -> None:
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    rows = paged(generator, HIDDEN, (INNER, INNER), dtype).rows
    row, base = tensor(normal(generator, 1, HIDDEN), dtype), tensor(normal(generator, CHOICES, 2 * INNER), dtype)
    for _ in range(3):
        num_tokens, at = 30, int(generator.integers(30))
        slots = generator.integers(0, SLOTS, num_tokens).astype(np.int32)
        experts = np.array([generator.permutation(EXPERTS)[:CHOICES] for _ in slots], np.int64)
        x = tensor(normal(generator, num_tokens, HIDDEN), dtype)
        y = tensor(normal(generator, num_tokens * CHOICES, 2 * INNER), dtype)
        alone, pairs = base.clone(), slice(at * CHOICES, (at + 1) * CHOICES)
        x[at], y[pairs] = row[0], base
        arguments = {"max_rank": MAX_RANK, "per_pair": False, "deterministic": True}
        triton.add_lora(x, y, rows, tensor(slots), tensor(experts), **arguments)
        triton.add_lora(row, alone, rows, tensor(slots[at : at + 1]), tensor(experts[at : at + 1]), **arguments)
        assert torch.equal(y[pairs], alone)


def test_groups_hold_every_live_pair_once() -> None:
    generator = rng()
    for _ in range(20):
        num_pairs = int(generator.integers(1, 200))
        ranks = tensor(generator.choice([0, 8], (7, 2)).astype(np.int32))
        pairs = tensor(generator.integers(0, 7, num_pairs))
        order, segments, cut = triton.groups(pairs, ranks)
        seen = []
        for start, count, key in segments.tolist():
            assert 0 <= count <= cut
            members = order[start : start + count].long()
            assert (pairs[members] == key).all()
            seen += members.tolist()
        live = (ranks != 0).any(1)[pairs].nonzero().flatten().tolist()
        assert sorted(seen) == live


def test_tables_that_do_not_fit_are_refused() -> None:
    rows = paged(rng(), HIDDEN, (INNER,), torch.float32).rows
    slots, experts = tensor(np.zeros(3, np.int32)), tensor(np.zeros((3, CHOICES), np.int64))
    x, y = torch.zeros(3, HIDDEN, device=DEVICE), torch.zeros(3 * CHOICES, INNER, device=DEVICE)
    for wrong_slots, wrong_rows in ((slots[1:], rows), (slots, rows._replace(row_starts=rows.row_starts[1:]))):
        with pytest.raises(ValueError, match="do not fit"):
            triton.add_lora(x, y, wrong_rows, wrong_slots, experts, max_rank=MAX_RANK, per_pair=False)
