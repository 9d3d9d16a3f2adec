"""The definition of a draw and its compiled form: the same uniform numbers, the same tokens."""

from __future__ import annotations

import numpy as np

from app.kernels.sampling import cpu as sampling
from app.kernels.sampling import reference
from tests.kernels.cases import normal, rng


def test_uniform_numbers_are_equal_in_every_bit() -> None:
    generator = rng()
    for seed, position in zip(
        [0, 2**64 - 1, *generator.integers(0, 2**63, 200).tolist()],
        [0, 5, *generator.integers(0, 100000, 200).tolist()],
        strict=True,
    ):
        compiled = sampling.uniform(np.uint64(seed), np.int64(position))
        assert reference.uniform(seed, position) == compiled


def test_draws_are_the_compiled_kernels_draws() -> None:
    """Two forms of exp differ in the last place, so a draw within 1e-5 of a border may fall either way."""
    generator = rng()
    agreed = 0
    for number in range(600):
        row = normal(generator, 300) * 3
        temperature, top_k = float(generator.uniform(0.3, 1.5)), int(generator.choice([0, 1, 20]))
        top_p, min_p = float(generator.choice([1.0, 0.9, 0.3])), float(generator.choice([0.0, 0.05]))
        settings = (np.float32(temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p))
        compiled = sampling.draw(row, *settings, np.uint64(number), np.int64(7))
        agreed += compiled == reference.draw(row, temperature, top_k, top_p, min_p, number, 7)
    assert agreed >= 598


def test_log_sum_exp_and_greedy() -> None:
    row = normal(rng(), 1000) * 10
    exact = np.log(np.exp(row.astype(np.float64) - 30).sum()) + 30
    assert abs(reference.log_sum_exp(row) - exact) < 1e-5
    assert reference.draw(row, 0.0, 0, 1.0, 0.0, 1, 1) == int(row.argmax())
