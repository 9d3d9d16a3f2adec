"""DoRA's scale from packed weights is the definition's."""

from __future__ import annotations

import numpy as np
import pytest

from app.kernels.dora import cpu, reference
from app.kernels.machine.team import Team
from app.kernels.matmul.cpu import pack
from tests import seeds


@pytest.mark.parametrize(("d_out", "d_in", "rank"), [(1, 1, 1), (16, 5, 2), (37, 24, 8), (20, 130, 40)])
def test_the_scale_is_the_definitions(d_out: int, d_in: int, rank: int) -> None:
    rng = seeds.rng()
    weight = rng.normal(size=(d_out, d_in)).astype(np.float32)
    a, b = rng.normal(size=(rank, d_in)).astype(np.float32), rng.normal(size=(rank, d_out)).astype(np.float32)
    magnitude = rng.uniform(0.5, 2, d_out).astype(np.float32)
    expected = reference.dora_scale(magnitude, weight, a, b)
    # W and BA may all but cancel in a row, above all where there is one weight: what rounding does to the parts of
    # the squared norm is then large beside what they add up to.
    parts = np.linalg.norm(weight, axis=1) + np.abs(b.T) @ np.linalg.norm(a, axis=1)
    condition = (parts * expected / magnitude) ** 2
    error = np.abs(cpu.dora_scale(Team(2), magnitude, pack(weight), a, b) - expected)
    assert (error <= 1e-6 * condition * expected).all(), (error, condition, expected)


@pytest.mark.parametrize("vanishing", [False, True])
def test_a_row_without_a_direction_has_scale_zero(vanishing: bool) -> None:
    weight = np.ones((3, 4), np.float32)
    a, b = np.ones((1, 4), np.float32), np.zeros((1, 3), np.float32)
    if vanishing:
        b[0, 1] = -1  # W + BA is zero there, W is not
    else:
        weight[1] = 0
    for scale in (
        reference.dora_scale(np.ones(3, np.float32), weight, a, b),
        cpu.dora_scale(Team(2), np.ones(3, np.float32), pack(weight), a, b),
    ):
        np.testing.assert_array_equal(scale, np.array([0.5, 0.0, 0.5], np.float32))
