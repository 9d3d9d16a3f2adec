"""Products in 8-bit integers: the reference's definition, and the reference's bits from every form of this machine."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.int8_matmul import reference, self_test
from app.kernels.int8_matmul.pack_dot import pack_dot, unpack_dot
from app.kernels.int8_matmul.quantise import new_rows
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.int8 import Int8Panels
from tests.kernels.cases import check_forms_are_compared, normal
from tests.seeds import rng

Floats = NDArray[np.float32]
GROUP = reference.GROUP
FORMS = self_test.machine_forms()


class Weights:
    """Random weights [N, K], of levels up to `most`: by column for the reference, and packed."""

    def __init__(self, generator: np.random.Generator, num_columns: int, depth: int, most: int) -> None:
        num_groups, padded = -(-depth // GROUP), -(-num_columns // 16) * 16
        self.depth = depth
        self.levels = generator.integers(0, most + 1, (padded, depth)).astype(np.uint8)
        self.scales, self.offsets = normal(generator, padded, num_groups), normal(generator, padded, num_groups)
        self.panels = Int8Panels(_panels(self.levels), _panels(self.scales), _panels(self.offsets))

    def multiply(self, form: str, x: Floats, out: Floats, *, accumulate: bool, low: int = 0, cut: int = 0) -> None:
        """In place: rows from `low` on, panels before and after `cut` in separate calls."""
        rows = new_rows(max(len(x), 1) * self.scales.shape[1] * GROUP)
        stack = pack_dot(Int8Panels._make(part[None] for part in self.panels), form, rows)
        w = type(stack)(stack.levels[0], stack.scales[0], stack.offsets[0], rows)
        for first, end in ((0, cut), (cut, len(self.panels.levels))):
            ThreadTeam(1).run(self_test.multiply_part, 2, x, low, len(x), w, first, end, out, accumulate)


def _panels(columns: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.ascontiguousarray(columns.reshape(-1, 16, columns.shape[1]).swapaxes(1, 2))


def _bits(values: Floats) -> NDArray[np.int32]:
    return values.view(np.int32)


def test_a_fused_multiply_add_is_rounded_once() -> None:
    """Against exact fractions, near ties above all: the sum's bits below float64's decide them."""
    generator = rng()
    a, b = normal(generator, 2000), normal(generator, 2000)
    c = (np.float64(1) * a * b * -1 + generator.standard_normal(2000) * 2.0 ** generator.integers(-60, 4, 2000)).astype(
        np.float32
    )
    tie = np.float32(1 + 2**-23)  # tie * tie = 1 + 2**-22 + 2**-46: above a tie by less than float64 keeps beside 2**7
    a, b, c = (np.append(part, value).astype(np.float32) for part, value in ((a, tie), (b, tie), (c, 2.0**7)))
    for x, y, z, found in zip(a, b, c, reference.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(found, np.float32(-np.inf)), np.nextafter(found, np.float32(np.inf))
        error = abs(Fraction(float(found)) - exact)
        assert all(error <= abs(Fraction(float(other)) - exact) for other in (below, above)), (x, y, z)


def test_the_reference_is_the_product_of_the_rounded_operands() -> None:
    generator = rng()
    for depth in (1, 31, 32, 100, 576):
        w = Weights(generator, 40, depth, 255)
        x = normal(generator, 5, depth) * np.float32(10) ** normal(generator, 5, 1)
        rows = reference.quantise_rows(x)
        spread = np.repeat(rows.scales, GROUP, axis=1)[:, :depth]
        rounded = spread.astype(np.float64) * rows.levels[:, :depth]
        assert (np.abs(rounded - x) <= spread * np.float32(0.5001)).all()
        scales, offsets = (np.repeat(part, GROUP, axis=1)[:, :depth] for part in (w.scales, w.offsets))
        exact = rounded @ (scales.astype(np.float64) * w.levels + offsets).T
        size = np.abs(rounded) @ (np.abs(scales.astype(np.float64)) * w.levels + np.abs(offsets)).T
        found = reference.int8_matmul(x, w.levels, w.scales, w.offsets)
        assert (np.abs(found - exact) <= size * 1e-6).all()


def test_groups_without_a_scale() -> None:
    x = np.zeros((4, 64), np.float32)
    x[1, 3], x[2, 40], x[3, 5] = np.inf, np.nan, 1e-33
    rows = reference.quantise_rows(x)
    assert not rows.levels.any()
    assert np.isnan(rows.scales[[1, 2], [0, 1]]).all()
    assert not rows.scales[[0, 0, 1, 2, 3, 3], [0, 1, 1, 0, 0, 1]].any()


@pytest.mark.parametrize("most", [15, 255])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_reference_to_the_bit(form: str, most: int) -> None:
    generator = rng()
    for num_columns, depth in ((16, 32), (35, 48), (100, 130), (64, 576), (1, 5)):
        w = Weights(generator, num_columns, depth, most)
        for num_rows in (*range(7), 33, 130):
            x = normal(generator, num_rows, depth) * np.float32(10) ** normal(generator, num_rows, 1)
            accumulate = bool(generator.integers(2))
            out = (
                normal(generator, num_rows, len(w.levels))
                if accumulate
                else np.full((num_rows, len(w.levels)), np.nan, np.float32)
            )
            expected = reference.int8_matmul(x, w.levels, w.scales, w.offsets, out if accumulate else None)
            cut = int(generator.integers(len(w.panels.levels) + 1))
            w.multiply(form, x, out, accumulate=accumulate, cut=cut)
            assert np.array_equal(_bits(out), _bits(expected)), (num_columns, depth, num_rows)


@pytest.mark.parametrize("form", FORMS)
def test_sums_as_large_as_they_can_be_do_not_saturate(form: str) -> None:
    for most in (15, 127, 128, 255):
        w = Weights(rng(), 16, 64, most)
        w.levels[:] = most
        w.panels.levels[:] = most
        x = np.repeat(np.array([[1], [-1], [1], [-1], [1]], np.float32), 64, axis=1)
        out = np.zeros((5, 16), np.float32)
        w.multiply(form, x, out, accumulate=False)
        assert np.array_equal(out, reference.int8_matmul(x, w.levels, w.scales, w.offsets))


@pytest.mark.parametrize("form", FORMS)
def test_infinities_and_nans_reach_every_column(form: str) -> None:
    generator = rng()
    w = Weights(generator, 32, 96, 15)
    x = normal(generator, 5, 96)
    x[1, 50], x[3, 95], x[4, 0] = np.inf, np.nan, 1e-38
    out = np.zeros((5, 32), np.float32)
    w.multiply(form, x, out, accumulate=False)
    assert np.isnan(out[[1, 3]]).all()
    assert np.array_equal(out[[0, 2, 4]], reference.int8_matmul(x[[0, 2, 4]], w.levels, w.scales, w.offsets))


@pytest.mark.parametrize("form", FORMS)
def test_some_rows_of_a_product_have_the_bits_that_they_have_alone(form: str) -> None:
    generator = rng()
    w = Weights(generator, 48, 70, 255)
    x = normal(generator, 40, 70)
    together = np.zeros((40, 48), np.float32)
    w.multiply(form, x, together, accumulate=False)
    for low in (1, 17, 38):
        out = np.zeros((40, 48), np.float32)
        w.multiply(form, x, out, accumulate=False, low=low)
        assert not out[:low].any()
        assert np.array_equal(out[low:], together[low:])
    for row in (0, 20, 39):
        alone = np.zeros((1, 48), np.float32)
        w.multiply(form, np.ascontiguousarray(x[row : row + 1]), alone, accumulate=False)
        assert np.array_equal(alone[0], together[row])


@pytest.mark.parametrize("most", [15, 16, 255])
def test_packing_keeps_every_level(most: int) -> None:
    w = Weights(rng(), 48, 70, most)
    w.levels[0, 0] = w.panels.levels[0, 0, 0] = most
    packed = pack_dot(Int8Panels._make(part[None] for part in w.panels), "portable", new_rows(0))
    assert packed.levels.nbytes == 48 * 96 * (1 if most > 15 else 0.5)
    for part, expected in zip(unpack_dot(packed, 70), w.panels, strict=True):
        assert np.array_equal(part[0], expected)


def test_a_form_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    check_forms_are_compared(monkeypatch, self_test, "int8_matmul")
