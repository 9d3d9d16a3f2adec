"""8-bit weights: the products of the expanded values to the bit, on a grid as fine as promised."""

from __future__ import annotations

import numpy as np
import pytest

from app.kernels.compiled import compiled
from app.kernels.matmul import _cpu, _quantised
from app.kernels.team import Team
from tests.kernels.cases import normal, rng


@compiled
def _multiply(x, w, first, end, out, accumulate):  # type: ignore[no-untyped-def]
    _quantised.multiply_any_panels(x, w, first, end, out, accumulate)


@pytest.mark.parametrize("shape", [(16, 32), (35, 48), (100, 130), (64, 576), (1, 5)])
def test_products_equal_those_of_the_expanded_weights_to_the_bit(shape: tuple[int, int]) -> None:
    generator = rng()
    num_columns, depth = shape
    w = _quantised.quantise(normal(generator, num_columns, depth))
    panels = _quantised.dequantise(w)
    for num_rows in (0, 1, 2, 3, 4, 7, 32, 65):
        x = normal(generator, num_rows, depth)
        for accumulate in (False, True):
            out = normal(generator, num_rows, len(panels) * 16)
            expected = out.copy()
            cut = int(generator.integers(len(panels) + 1))
            _multiply(x, w, 0, cut, out, accumulate)
            _multiply(x, w, cut, len(panels), out, accumulate)
            Team(1).run(_cpu.matmul, 1, x, panels, expected, accumulate)
            assert np.array_equal(out, expected)


def test_the_error_is_at_most_half_a_step_of_each_group() -> None:
    w = normal(rng(), 48, 100) * 3
    error = np.abs(_quantised.dequantise(_quantised.quantise(w)) - _cpu.pack(w))
    for first in range(0, 100, _quantised.GROUP):
        group = _cpu.pack(w)[:, first : first + _quantised.GROUP]
        step = (group.max(axis=1) - group.min(axis=1)) / 255
        assert (error[:, first : first + _quantised.GROUP] <= step[:, None] * 0.5001 + 1e-6).all()


def test_weights_on_a_four_bit_grid_come_through_up_to_rounding() -> None:
    generator = rng()
    levels = generator.integers(0, 16, (16, 8, 32)).astype(np.float32)
    levels[:, :, 0], levels[:, :, 1] = 0, 15
    scale, offset = generator.uniform(0.001, 0.1, (2, 16, 8, 1)).astype(np.float32)
    w = (levels * scale - offset * 8).reshape(16, 256).astype(np.float32)
    assert np.abs(_quantised.dequantise(_quantised.quantise(w)) - _cpu.pack(w)).max() < 5e-7


def test_constant_weights_are_exact() -> None:
    w = np.full((16, 40), -2.5, np.float32)
    assert np.array_equal(_quantised.dequantise(_quantised.quantise(w)), _cpu.pack(w))
