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

Ranks = NDArray[np.int64]
HIDDEN, INNER, EXPERTS, CHOICES, SLOTS, MAX_RANK = 40, 24, 4, 2, 5, 20


class Paged(NamedTuple):
    """One product's tables: what the reference gets and what the kernel gets."""

    arrays: reference.ExpertRows
    rows: RankRows


def random_ranks(generator: np.random.Generator, num_slices: int) -> Ranks:
    """[SLOTS, EXPERTS, num_slices]: a rank per expert, some experts and slices left alone."""
    ranks = generator.choice([0, 1, 5, 16, MAX_RANK], (SLOTS, EXPERTS, 1)).repeat(num_slices, axis=2)
    ranks[generator.random(ranks.shape) < 0.2] = 0
    ranks[0] = 0
    return ranks


def paged(
    generator: np.random.Generator, depth: int, widths: tuple[int, ...], dtype: torch.dtype, ranks: Ranks | None = None
) -> Paged:
    """Adapters of these or of random ranks; rows nobody owns are NaN."""
    if ranks is None:
        ranks = random_ranks(generator, len(widths))
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


def check_mixture(
    generator: np.random.Generator, slots: list[int], first: Paged, second: Paged, experts: NDArray[np.int64], *,
    grouped: bool, deterministic: bool,
) -> None:  # fmt: skip
    """The base products are torch's here, in float32, and rounded once, like the kernels' own output."""
    num_tokens, dtype = len(slots), first.rows.a.dtype
    x = tensor(normal(generator, num_tokens, HIDDEN), dtype)
    gate_up = tensor(normal(generator, EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5, dtype)
    down = tensor(normal(generator, EXPERTS, HIDDEN, INNER) / INNER**0.5, dtype)
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
    before = pairs.clone()
    triton.add_lora(hidden, pairs, second.rows, *on_device, per_pair=True, **arguments)
    untouched = (second.arrays.ranks[np.repeat(slots, CHOICES).astype(int), experts.flatten()] == 0).all(axis=1)
    assert torch.equal(pairs[torch.from_numpy(untouched).to(DEVICE)], before[torch.from_numpy(untouched).to(DEVICE)])
    out = (pairs.float().view(num_tokens, CHOICES, HIDDEN) * tensor(weights)[:, :, None]).sum(1)

    expected = reference.mixture(
        numpy(x), numpy(gate_up), numpy(down), experts, weights, np.array(slots, np.int32), first.arrays,
        second.arrays, silu,
    )  # fmt: skip
    assert error(out, expected) < TOLERANCE[dtype], dtype


def chosen(generator: np.random.Generator, num_tokens: int) -> NDArray[np.int64]:
    """[T, CHOICES], different experts of each token."""
    rows = [generator.permutation(EXPERTS)[:CHOICES] for _ in range(num_tokens)]
    return np.array(rows, np.int64).reshape(-1, CHOICES)


WAYS = pytest.mark.parametrize(("grouped", "deterministic"), [(False, False), (True, False), (True, True)])


@WAYS
@pytest.mark.parametrize("slots", [[], [0, 0, 0], [3], [2] * 11, [1, 2, 3, 4, 0, 4, 1, 4, 2]])
def test_equals_the_mixture(slots: list[int], grouped: bool, deterministic: bool) -> None:
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    first, second = paged(generator, HIDDEN, (INNER, INNER), dtype), paged(generator, INNER, (HIDDEN,), dtype)
    experts = chosen(generator, len(slots))
    check_mixture(generator, slots, first, second, experts, grouped=grouped, deterministic=deterministic)


def _ranks(which: str) -> tuple[Ranks, Ranks]:
    """Of gate/up [SLOTS, EXPERTS, 2] and of down [SLOTS, EXPERTS, 1]; the base has none."""
    gate_up, down = np.zeros((SLOTS, EXPERTS, 2), np.int64), np.zeros((SLOTS, EXPERTS, 1), np.int64)
    if which == "one expert of one adapter":
        gate_up[2, 1], down[2, 1] = 5, 5
    elif which == "a rank of its own per expert":
        gate_up[1:], down[1:] = np.array([1, MAX_RANK, 7, 16])[:, None], np.array([MAX_RANK, 1, 16, 2])[:, None]
    elif which == "down only":
        down[1:] = 9
    elif which == "gate only":
        gate_up[1:, :, 0] = 6
    elif which == "up only":
        gate_up[1:, :, 1] = 6
    return gate_up, down


@WAYS
@pytest.mark.parametrize(
    "which",
    ["one expert of one adapter", "a rank of its own per expert", "down only", "gate only", "up only", "nothing"],
)
def test_an_adapter_may_leave_alone_what_it_likes(which: str, grouped: bool, deterministic: bool) -> None:
    """Adapters all at once and the base between them; every expert is chosen, one of them by every token."""
    generator = rng()
    dtype = DTYPES[int(generator.integers(len(DTYPES)))]
    slots = [2, 1, 0, 2, 3, 4, 2]
    experts = np.array([[1, other] for other in (0, 2, 3, 0, 2, 3, 0)], np.int64)
    experts[::2] = experts[::2, ::-1]
    ranks = _ranks(which)
    first = paged(generator, HIDDEN, (INNER, INNER), dtype, ranks[0])
    second = paged(generator, INNER, (HIDDEN,), dtype, ranks[1])
    check_mixture(generator, slots, first, second, experts, grouped=grouped, deterministic=deterministic)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_wrong_adapter_or_a_wrong_expert_would_be_seen(grouped: bool) -> None:
    """Ranks are alike, so only the rows themselves differ."""
    generator, ranks = rng(), np.full((SLOTS, EXPERTS, 2), 4)
    ranks[0] = 0
    given = paged(generator, HIDDEN, (INNER, INNER), torch.float32, ranks)
    x = tensor(normal(generator, 1, HIDDEN), torch.float32)
    for adapter_slot, pair in ((1, (0, 1)), (2, (0, 1)), (1, (1, 0)), (4, (3, 2))):
        out = torch.zeros(CHOICES, 2 * INNER, device=DEVICE)
        on_device = tensor(np.array([adapter_slot], np.int32)), tensor(np.array([pair], np.int64))
        triton.add_lora(x, out, given.rows, *on_device, max_rank=MAX_RANK, per_pair=False, grouped=grouped)
        for k, expert in enumerate(pair):
            right = given.arrays.delta(numpy(x)[0], adapter_slot, expert)
            assert error(out[k], right) < TOLERANCE[torch.float32]
            for wrong in ((adapter_slot, pair[1 - k]), (adapter_slot % 4 + 1, expert)):
                assert error(out[k], given.arrays.delta(numpy(x)[0], *wrong)) > 0.1


def test_few_pairs_are_computed_one_by_one_and_many_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the caller says, or bits must not depend on how many they are."""
    generator = rng()
    rows = paged(generator, HIDDEN, (INNER,), torch.float32).rows
    calls: list[str] = []
    for name in ("bgmv", "sgmv"):
        monkeypatch.setattr(getattr(triton, name), "add_lora", lambda *_, name=name, **__: calls.append(name))
    for num_tokens, deterministic in ((3, False), (3, True), (511, False), (512, False)):
        x = torch.zeros(num_tokens, HIDDEN, device=DEVICE)
        y = torch.zeros(num_tokens * CHOICES, INNER, device=DEVICE)
        slots, experts = tensor(np.ones(num_tokens, np.int32)), tensor(chosen(generator, num_tokens))
        triton.add_lora(
            x, y, rows, slots, experts, max_rank=MAX_RANK, per_pair=False, deterministic=deterministic
        )  # fmt: skip
    assert calls == ["bgmv", "sgmv", "bgmv", "sgmv"]


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
