"""Draws: the definition's uniform numbers and tokens, the right distribution, and each row by its own parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.sampling import cpu, reference
from tests.kernels.cases import normal
from tests.seeds import rng

Floats = NDArray[np.float32]
PLAIN: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def draw(row: Floats, seed: int, position: int = 3, **settings: float) -> int:
    """The compiled draw of one row."""
    values = PLAIN | settings
    return int(
        cpu.draw(
            row, np.float32(values["temperature"]), np.int32(values["top_k"]), np.float32(values["top_p"]),
            np.float32(values["min_p"]), np.uint64(seed), np.int64(position),
        )
    )  # fmt: skip


def sample(
    logits: Floats,
    rows: list[dict[str, float]],
    seeds: Any,
    positions: Any,
    logprobs: Any,
    threads: int = 2,
    mask_of_row: NDArray[np.int32] | None = None,
    masks: NDArray[np.uint32] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Tokens and normalisers of all rows by `sample_rows`; what it leaves alone is -1 and NaN."""

    def column(name: str, kind: type) -> NDArray[Any]:
        return np.array([(PLAIN | settings)[name] for settings in rows], kind)

    tokens, normalisers = np.full(len(logits), -1, np.int32), np.full(len(logits), np.nan)
    team = ThreadTeam(threads)
    team.run(
        cpu.sample_rows, 1, logits, column("temperature", np.float32), column("top_k", np.int32),
        column("top_p", np.float32), column("min_p", np.float32), np.asarray(seeds, np.uint64),
        np.asarray(positions, np.int64), np.asarray(logprobs, np.bool_),
        np.full(len(logits), -1, np.int32) if mask_of_row is None else mask_of_row,
        np.zeros((0, 0), np.uint32) if masks is None else masks, tokens, normalisers,
    )  # fmt: skip
    team.close()
    return tokens, normalisers


def test_uniform_numbers_are_the_definitions_in_every_bit() -> None:
    generator = rng()
    for seed, position in zip(
        [0, 2**64 - 1, *generator.integers(0, 2**63, 200).tolist()],
        [0, 5, *generator.integers(0, 100000, 200).tolist()],
        strict=True,
    ):
        compiled = cpu.uniform(np.uint64(seed), np.int64(position))
        assert reference.uniform(seed, position) == compiled
        assert 0 <= compiled < 1


def test_draws_are_the_definitions() -> None:
    """Two forms of exp differ in the last place, so a draw within 1e-5 of a border may fall either way."""
    generator = rng()
    agreed = 0
    for number in range(600):
        row = normal(generator, 300) * 3
        temperature, top_k = float(generator.uniform(0.3, 1.5)), int(generator.choice([0, 1, 20]))
        top_p, min_p = float(generator.choice([1.0, 0.9, 0.3])), float(generator.choice([0.0, 0.05]))
        drawn = draw(row, number, 7, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        agreed += drawn == reference.draw(row, temperature, top_k, top_p, min_p, number, 7)
    assert agreed >= 598


def test_draws_follow_the_distribution_and_depend_on_seed_and_position_only() -> None:
    row = rng().uniform(-2, 2, 12).astype(np.float32)  # each of them is expected some ten times or more
    p = np.exp(row.astype(np.float64) / 0.7)
    p /= p.sum()
    logits = np.broadcast_to(row, (20000, 12)).copy()
    drawn, _ = sample(logits, [{"temperature": 0.7}] * 20000, np.arange(20000), np.full(20000, 3), np.zeros(20000))
    counts = np.bincount(drawn, minlength=12)
    chi_squared = ((counts - 20000 * p) ** 2 / (20000 * p)).sum()
    assert chi_squared < 60  # 11 degrees of freedom: p < 1e-8
    assert draw(row, 7, temperature=0.7) == drawn[7]
    assert len({draw(row, 7, position) for position in range(200)}) > 1


def test_every_row_is_drawn_by_its_own_parameters() -> None:
    """A row alone, and between any others on any number of threads: the same token."""
    generator = rng()
    logits = normal(generator, 9, 77) * 2
    rows: list[dict[str, float]] = [
        {"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.4}, {"min_p": 0.2}, {"temperature": 2.0},
        {"top_k": 5, "top_p": 0.7}, {"temperature": 0.0, "top_k": 3}, {"temperature": 0.3, "min_p": 0.05},
    ]  # fmt: skip
    seeds, positions = generator.integers(0, 2**62, 9), generator.integers(0, 5000, 9)
    tokens, _ = sample(logits, rows, seeds, positions, np.zeros(9), threads=3)
    for number, settings in enumerate(rows):
        one = slice(number, number + 1)
        alone, _ = sample(logits[one], [settings], seeds[one], positions[one], np.zeros(1), threads=1)
        assert alone[0] == tokens[number], settings
        if settings.get("temperature") == 0:
            assert tokens[number] == logits[number].argmax()
    order = generator.permutation(9)
    shuffled, _ = sample(
        logits[order], [rows[i] for i in order], seeds[order], positions[order], np.zeros(9), threads=2
    )
    assert np.array_equal(shuffled, tokens[order])


def test_normalisers_are_written_where_they_are_wanted() -> None:
    generator = rng()
    logits, wanted = normal(generator, 5, 1001) * 10, np.array([True, False, True, False, True])
    _, found = sample(logits, [{}] * 5, np.zeros(5), np.zeros(5), wanted)
    assert np.array_equal(np.isnan(found), ~wanted)
    for row, value in zip(logits[wanted], found[wanted], strict=True):
        exact = np.log(np.exp(row.astype(np.float64) - 30).sum()) + 30
        assert abs(value - exact) < 1e-5
        assert abs(reference.log_sum_exp(row) - exact) < 1e-5


@pytest.mark.parametrize("vocab", [1, 7, 16, 17, 300])
def test_the_largest_logit_is_found_wherever_it_stands_and_ties_go_to_the_smallest_id(vocab: int) -> None:
    generator = rng()
    row = -np.abs(normal(generator, vocab)) - 1
    for at in {0, vocab - 1, *generator.integers(0, vocab, 5).tolist()}:
        peaked = row.copy()
        peaked[at:] = np.where(generator.random(vocab - at) < 0.3, 0.0, peaked[at:])
        peaked[at] = 0.0
        assert cpu.row_maximum(peaked) == (0.0, at)
        assert reference.draw(peaked, 0.0, 0, 1.0, 0.0, 1, 1) == at
    assert cpu.row_maximum(np.full(vocab, -3.5, np.float32)) == (-3.5, 0)


@pytest.mark.parametrize("vocab", [1, 7, 16, 17, 300])
def test_what_is_no_number_is_found_wherever_it_stands(vocab: int) -> None:
    generator = rng()
    for at in {0, vocab - 1, *generator.integers(0, vocab, 5).tolist()}:
        row = normal(generator, vocab)
        row[at] = np.nan
        row[at + 1 :] = np.where(generator.random(vocab - at - 1) < 0.3, np.nan, row[at + 1 :])
        top, index = cpu.row_maximum(row)
        assert np.isnan(top)
        assert index == at == reference.draw(row, 0.0, 0, 1.0, 0.0, 1, 1)


@pytest.mark.parametrize("lost", [np.nan, np.inf])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_an_overflow_is_not_drawn_past(lost: float, settings: dict[str, float]) -> None:
    """The logit of the token is what is looked at."""
    generator = rng()
    logits, at = normal(generator, 20, 300), generator.integers(0, 300, 20)
    logits[np.arange(20), at] = lost
    drawn, _ = sample(logits, [settings] * 20, np.arange(20), np.full(20, 3), np.zeros(20))
    assert drawn.tolist() == at.tolist()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 3}, {5, 4, 3}),
        ({"top_k": 6}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.5}, {5}),
        ({"top_p": 0.8}, {5, 4}),
        ({"min_p": 0.3}, {5, 4}),
        ({"top_k": 2, "top_p": 0.99}, {5, 4}),
        ({"top_k": 1, "min_p": 0.001}, {5}),
    ],
)
def test_filters_keep_exactly_the_right_tokens(settings: dict[str, float], kept: set[int]) -> None:
    p = np.array([0.01, 0.02, 0.03, 0.12, 0.22, 0.60])
    row = np.log(p).astype(np.float32)
    logits = np.broadcast_to(row, (3000, 6)).copy()
    drawn, _ = sample(logits, [settings] * 3000, np.arange(3000), np.full(3000, 3), np.zeros(3000))
    assert set(drawn.tolist()) == kept
    by_definition = {
        reference.draw(row, 1.0, int(values["top_k"]), values["top_p"], values["min_p"], seed, 3)
        for values in [PLAIN | settings]
        for seed in range(800)
    }
    assert by_definition <= kept


def test_top_p_equals_a_full_sort_on_flat_and_peaked_rows() -> None:
    generator = rng()
    for scale in (0.01, 1.0, 6.0):
        row = normal(generator, 700) * np.float32(scale)
        p = np.exp(row.astype(np.float64) - row.max())
        for top_p in (0.1, 0.5, 0.9, 0.999):
            ordered = np.sort(p)[::-1]
            size = int(np.searchsorted(np.cumsum(ordered), top_p * ordered.sum())) + 1
            drawn = {draw(row, seed, top_p=top_p) for seed in range(300)}
            assert drawn <= set(np.argsort(-p, kind="stable")[: size + 1].tolist())


def test_a_masked_row_is_drawn_among_its_allowed_tokens_as_if_there_were_no_others() -> None:
    """Sizes that fill no word; masks of one token, of all but one, and of all; rows without a mask keep their bits."""
    generator = rng()
    for size in (1, 31, 32, 33, 300):
        count = 40
        logits = normal(generator, count, size) * 3
        allowed = generator.random((count, size)) < generator.choice([0.05, 0.5, 0.95], (count, 1))
        allowed[np.arange(count), generator.integers(0, size, count)] = True
        bits = np.zeros((count, -(-size // 32) * 32), np.uint8)
        bits[:, :size] = allowed
        words = np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)
        of_row = np.where(np.arange(count) % 3 == 2, -1, np.arange(count)).astype(np.int32)
        rows = [
            {"temperature": float(generator.choice([0.0, 0.8, 1.5])), "top_k": int(generator.choice([0, 3])),
             "top_p": float(generator.choice([1.0, 0.7])), "min_p": float(generator.choice([0.0, 0.1]))}
            for _ in range(count)
        ]  # fmt: skip
        seeds, positions = generator.integers(0, 2**62, count), generator.integers(0, 5000, count)
        given = logits.copy()
        drawn, _ = sample(given, rows, seeds, positions, np.zeros(count), mask_of_row=of_row, masks=words)
        free, _ = sample(logits.copy(), rows, seeds, positions, np.zeros(count))
        for p in range(count):
            if of_row[p] < 0:
                assert drawn[p] == free[p]
                assert np.array_equal(given[p], logits[p])
                continue
            assert allowed[p, drawn[p]]
            ids = np.flatnonzero(allowed[p])
            one = slice(p, p + 1)
            without, _ = sample(logits[one][:, ids].copy(), [rows[p]], seeds[one], positions[one], np.zeros(1))
            assert drawn[p] == ids[without[0]]
