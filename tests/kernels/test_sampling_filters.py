"""Draws against a definition in float64 with a full sort: what each filter keeps, with ties and in which order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.sampling import cpu, reference
from tests.kernels.cases import normal
from tests.kernels.test_sampling import PLAIN, draw, sample
from tests.pairwise import pairwise
from tests.seeds import rng

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
#: How near to a border two forms of exp may disagree about, relative to the mass.
_NEAR = 3e-6


class Kept(NamedTuple):
    """Probabilities of a row, zero for what the filters took; whether a filter's border is too near to tell."""

    p: Doubles
    unclear: bool


def kept(row: Floats, *, temperature: float, top_k: float, top_p: float, min_p: float) -> Kept:
    """Temperature, top-k, top-p and min-p, in that order, each of what the one before has left."""
    p = np.exp((row.astype(np.float64) - row.max()) / np.float32(temperature))
    floor, unclear = 0.0, False
    if 0 < top_k < len(p):
        floor = np.sort(p)[-int(top_k)]
    if top_p < 1:
        candidates = np.sort(p[p >= floor])[::-1]
        held, wanted = np.cumsum(candidates), float(np.float32(top_p)) * candidates.sum()
        first = int(np.argmax(held >= wanted))
        unclear = bool((np.abs(held - wanted) < _NEAR * held[-1]).any())
        floor = candidates[first]
    if min_p > floor:
        floor = float(np.float32(min_p))
    unclear |= bool(((np.abs(p - floor) < _NEAR * floor) & (p != floor)).any())
    return Kept(np.where(p >= floor, p, 0.0), unclear)


def expected_token(p: Doubles, seed: int, position: int) -> tuple[int, bool]:
    """The first token whose cumulated probability exceeds the uniform number; whether that is too near to tell."""
    held = np.cumsum(p)
    target = reference.uniform(seed, position) * held[-1]
    return int(np.argmax(held > target)), bool((np.abs(held - target) < _NEAR * held[-1]).any())


SETTINGS: dict[str, dict[str, float]] = {
    "plain": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 20.0},
    "top_k": {"top_k": 7},
    "top_k of one": {"top_k": 1},
    "top_k of all": {"top_k": 200},
    "top_k of more than all": {"top_k": 100_000},
    "top_p": {"top_p": 0.7},
    "next to no top_p": {"top_p": 1e-6},
    "next to all top_p": {"top_p": 0.9999},
    "min_p": {"min_p": 0.1},
    "min_p of the largest": {"min_p": 1.0},
    "top_k, then top_p": {"top_k": 20, "top_p": 0.5},
    "all": {"temperature": 1.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
}


@pairwise({"name": SETTINGS, "vocab": [1, 2, 17, 200]}, strength=1)
def test_every_draw_is_the_definitions(name: str, vocab: int) -> None:
    generator, settings = rng(), PLAIN | SETTINGS[name]
    num_rows = 60
    logits = normal(generator, num_rows, vocab) * generator.choice([0.1, 1, 5], (num_rows, 1)).astype(np.float32)
    seeds, positions = generator.integers(0, 2**62, num_rows), generator.integers(0, 10**6, num_rows)
    drawn, _ = sample(logits, [settings] * num_rows, seeds, positions, np.zeros(num_rows))
    clear = 0
    for row, seed, position, token in zip(logits, seeds.tolist(), positions.tolist(), drawn.tolist(), strict=True):
        found = kept(row, **settings)
        wanted, unclear = expected_token(found.p, seed, position)
        if not (found.unclear or unclear):
            clear += 1
            assert token == wanted, (seed, position)
    assert clear > num_rows / 2


def test_the_definition_sees_a_filter_that_is_left_out() -> None:
    row = normal(rng(), 300)
    for name in ("top_k", "top_p", "min_p", "cold"):
        without, found = kept(row, **PLAIN), kept(row, **(PLAIN | SETTINGS[name]))
        differ = [expected_token(without.p, s, 0)[0] != expected_token(found.p, s, 0)[0] for s in range(200)]
        assert any(differ), name


def _drawn(row: Floats, num_draws: int = 4000, **settings: float) -> set[int]:
    logits = np.broadcast_to(row, (num_draws, len(row))).copy()
    tokens, _ = sample(logits, [settings] * num_draws, np.arange(num_draws), np.full(num_draws, 9), np.zeros(num_draws))
    return set(tokens.tolist())


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"top_k": 1}, {1, 4, 6}),  # all that equal the largest stay in
        ({"top_k": 2}, {1, 4, 6}),
        ({"top_k": 4}, {1, 4, 6, 0, 3}),
        ({"top_p": 0.05}, {1, 4, 6}),
        ({"top_p": 0.9}, {1, 4, 6, 0, 3}),
        ({"min_p": 1.0}, {1, 4, 6}),
        ({"min_p": 0.24}, {1, 4, 6, 0, 3}),
        ({"top_k": 3, "top_p": 0.99}, {1, 4, 6}),
    ],
)
def test_what_equals_a_cut_off_stays_in(settings: dict[str, float], tokens: set[int]) -> None:
    p = np.array([1, 4, 1 / 16, 1, 4, 1 / 16, 4])  # of 14 1/8
    assert _drawn(np.log(p).astype(np.float32), **settings) == tokens


def test_top_p_counts_what_top_k_has_left() -> None:
    """Of 0.4, 0.3, 0.2, 0.1 the first two hold 0.7; of the first three, which are 0.9 in all, they hold 0.78."""
    row = np.log(np.array([0.1, 0.4, 0.2, 0.3])).astype(np.float32)
    assert _drawn(row, top_p=0.75) == {1, 3, 2}
    assert _drawn(row, top_k=3, top_p=0.75) == {1, 3}


def test_min_p_is_relative_to_the_largest_at_the_rows_temperature() -> None:
    row = np.log(np.array([0.64, 0.16, 0.16, 0.04])).astype(np.float32)
    assert _drawn(row, min_p=0.2) == {0, 1, 2}
    assert _drawn(row, min_p=0.2, temperature=2.0) == {0, 1, 2, 3}  # 1, 1/2, 1/2, 1/4
    assert _drawn(row, min_p=0.2, temperature=0.5) == {0}


def test_masked_tokens_are_never_drawn() -> None:
    """A grammar's mask is minus infinity; few tokens or one may be left, fewer than top_k asks for."""
    generator = rng()
    for num_left in (1, 3):
        row = np.full(50, -np.inf, np.float32)
        left = generator.permutation(50)[:num_left]
        row[left] = normal(generator, num_left) * np.float32(0.1)
        cases: tuple[dict[str, float], ...] = (
            {},
            {"top_k": 10},
            {"top_p": 0.9999},
            {"temperature": 50.0},
            {"temperature": 0.0},
        )
        for settings in cases:
            greedy = settings.get("temperature") == 0.0
            assert _drawn(row, 300, **settings) == ({int(row.argmax())} if greedy else set(left.tolist()))


def test_a_shift_of_all_logits_changes_no_draw() -> None:
    """By a power of two that logits of few bits can take without rounding."""
    row = (rng().integers(-64, 64, 100) / 16).astype(np.float32)
    for shift in (-1024.0, 512.0):
        for seed in range(100):
            assert draw(row, seed, top_p=0.9) == draw(row + np.float32(shift), seed, top_p=0.9)


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_numbers_of_neighbouring_counters_are_uniform_and_unrelated(axis: str) -> None:
    first, count, bins = int(rng().integers(0, 2**40)), 20_000, 16
    counters = range(first, first + count)
    pairs = ((i, 5) for i in counters) if axis == "seeds" else ((5, i) for i in counters)
    found = np.array([cpu.uniform(np.uint64(seed), np.int64(position)) for seed, position in pairs])
    assert len(np.unique(found)) == count
    cells = (found * bins).astype(int)
    squares = [
        ((np.bincount(numbers, minlength=size) - count / size) ** 2 / (count / size)).sum()
        for numbers, size in ((cells, bins), (cells[:-1] * bins + cells[1:], bins * bins))
    ]
    assert squares[0] < 60  # 15 degrees of freedom: p < 1e-6
    assert squares[1] < 420  # 225 degrees of freedom, and twice the 15 of the numbers, for pairs overlap: p < 1e-7
