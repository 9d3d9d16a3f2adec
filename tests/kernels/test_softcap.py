"""Scaled rows, soft caps, and norms that are added: the definition's numbers, each row alone."""

from __future__ import annotations

import numpy as np
import pytest

from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.norms import cpu as norms
from app.kernels.norms.reference import rms_norm
from app.kernels.softcap import cpu, reference
from tests.kernels.cases import normal
from tests.seeds import rng


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 17), (9, 300)])
@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_a_soft_cap_is_the_definition(shape: tuple[int, int], cap: float) -> None:
    x = normal(rng(), *shape) * np.float32(40)
    expected, team = reference.cap_rows(x, cap), ThreadTeam(2)
    team.run(cpu.cap_rows, 1, np.float32(cap), x)
    team.close()
    assert np.abs(x - expected).max(initial=0.0) <= 4e-6 * cap
    assert np.abs(x).max(initial=0.0) <= cap


def test_what_is_large_is_the_cap_and_what_overflowed_stays_visible() -> None:
    x = np.array([[1e30, -1e30, 0.0, np.inf, np.nan]], np.float32)
    team = ThreadTeam(1)
    team.run(cpu.cap_rows, 1, np.float32(30.0), x)
    team.close()
    assert x[0, :3].tolist() == [30.0, -30.0, 0.0]
    assert np.isnan(x[0, 3:]).all()


def test_rows_are_scaled() -> None:
    x = normal(rng(), 7, 33)
    expected, team = x * np.float32(25.298), ThreadTeam(2)
    team.run(cpu.scale_rows, 1, np.float32(25.298), x)
    team.close()
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_a_norm_is_added_to_what_is_there(num_rows: int) -> None:
    generator = rng()
    x, weight, out = normal(generator, num_rows, 40), normal(generator, 24), normal(generator, num_rows, 40)
    expected = out.astype(np.float64)
    for row, into in zip(x, expected, strict=True):
        into[:24] += rms_norm(row[:24], weight, 1e-5)
    rest, team = out[:, 24:].copy(), ThreadTeam(2)
    team.run(norms.normalise_and_add, 1, x, weight, np.float32(1e-5), out)
    team.close()
    assert np.abs(out - expected).max(initial=0.0) < 1e-5
    assert np.array_equal(out[:, 24:], rest)
