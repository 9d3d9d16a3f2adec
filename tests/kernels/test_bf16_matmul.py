"""Products in bfloat16: the reference's definition, and the reference's bits from every form of this machine."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.bf16_matmul import amx, cpu, reference, self_test
from app.kernels.cast_bf16.reference import bfloat16_bits
from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import ThreadTeam
from tests.kernels.cases import check_forms_are_compared, normal
from tests.seeds import rng

Floats = NDArray[np.float32]
FORMS = self_test.machine_forms()
SMALLEST = reference.SMALLEST


def product(form: str, x: Floats, w: Floats, out: Floats, *, accumulate: bool, low: int = 0, cut: int = 0) -> None:
    """In place: rows from `low` on, panels before and after `cut` in separate calls."""
    panels = self_test.panels_for(w, form, len(x))
    for first, end in ((0, cut), (cut, len(panels.pairs))):
        ThreadTeam(1).run(self_test.multiply_part, 2, x, low, len(x), panels, first, end, out, accumulate)


def _same(found: Floats, expected: Floats) -> bool:
    """Equal bits, where any NaN equals any other."""
    nan = np.isnan(expected)
    equal = found.view(np.int32) == expected.view(np.int32)
    return bool(((np.isnan(found) == nan) & (nan | equal)).all())


def _rounded(exact: Fraction) -> Fraction:
    """The nearest float32, ties to even."""
    guess = np.float32(float(exact))
    candidates = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    return min((abs(Fraction(float(c)) - exact), int(c.view(np.int32)) & 1, Fraction(float(c))) for c in candidates)[2]


def test_rounding_is_to_the_nearest_ties_to_even() -> None:
    generator = rng()
    values = normal(generator, 4000) * np.float32(10) ** generator.integers(-6, 30, 4000).astype(np.float32)
    values[:500] = (values[:500].view(np.int32) & -65536 | 0x8000).view(np.float32)  # ties
    found = reference.to_bfloat16(values)
    np.testing.assert_array_equal(found.view(np.uint32), bfloat16_bits(values).astype(np.uint32) << 16)
    special = np.array([np.inf, -np.inf, np.nan, 3.4e38, SMALLEST, np.nextafter(SMALLEST, np.float32(0)), -1e-30, -0.0])
    rounded = reference.to_bfloat16(special.astype(np.float32))
    np.testing.assert_array_equal(rounded, [np.inf, -np.inf, np.nan, np.inf, SMALLEST, 0, 0, 0])


def test_the_reference_rounds_in_the_order_of_amx() -> None:
    """Intel's description of TDPBF16PS in exact fractions, with sizes that make every rounding matter."""
    generator = rng()
    for depth in (1, 5, 32, 70):
        x, w = (normal(generator, 3, depth) * np.float32(2) ** normal(generator, 3, depth) * 4 for _ in range(2))
        start = normal(generator, 3, 3)
        found = reference.bf16_matmul(x, w, start)
        rounded = [np.pad(reference.to_bfloat16(operand), ((0, 0), (0, -depth % 32))) for operand in (x, w)]
        for i, n in np.ndindex(3, 3):
            total = Fraction(0)
            for first in range(0, rounded[0].shape[1], 32):
                chains = [Fraction(0), Fraction(0)]
                for k in range(first, first + 32):
                    term = Fraction(float(rounded[0][i, k])) * Fraction(float(rounded[1][n, k]))
                    chains[k % 2] = _rounded(chains[k % 2] + term)
                total = _rounded(total + _rounded(chains[0] + chains[1]))
            assert _rounded(Fraction(float(start[i, n])) + total) == Fraction(float(found[i, n])), (depth, i, n)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_reference_to_the_bit(form: str) -> None:
    generator = rng()
    for num_columns, depth in ((16, 32), (35, 48), (100, 130), (64, 576), (1, 5)):
        w, padded = normal(generator, num_columns, depth), -(-num_columns // 16) * 16
        for num_rows in (*range(7), 16, 17, 33, 50):
            x = normal(generator, num_rows, depth) * np.float32(10) ** normal(generator, num_rows, 1)
            accumulate = bool(generator.integers(2))
            out = normal(generator, num_rows, padded)
            start = out.copy() if accumulate else None
            if not accumulate:
                out[:] = np.nan
            product(form, x, w, out, accumulate=accumulate, cut=int(generator.integers(padded // 16 + 1)))
            wide = np.pad(w, ((0, padded - num_columns), (0, 0)))
            assert _same(out, reference.bf16_matmul(x, wide, start)), (num_columns, depth, num_rows)


@pytest.mark.parametrize("form", FORMS)
def test_more_rows_than_pass_by_at_a_time(form: str) -> None:
    """Rows beyond 512, by the values of the same rows in a small product; sums of parts of the depth wait in memory."""
    generator = rng()
    x, w = normal(generator, 530, 650), normal(generator, 32, 650)
    for accumulate in (False, True):
        out = np.ones((530, 32), np.float32)
        product(form, x, w, out, accumulate=accumulate)
        start = np.ones((40, 32), np.float32) if accumulate else None
        assert _same(out[-40:], reference.bf16_matmul(x[-40:], w, start))
        assert _same(out[:40], reference.bf16_matmul(x[:40], w, start))


@pytest.mark.parametrize("form", FORMS)
def test_extreme_sizes_cancellation_and_values_that_are_not_finite(form: str) -> None:
    """Products as small as they can be, whose sums cancel, make the smallest normal number and never a denormal one."""
    generator = rng()
    x, w = (normal(generator, rows, 96) * np.float32(2) ** generator.integers(-60, 60, (rows, 96)) for rows in (19, 48))
    x, w = x.astype(np.float32), w.astype(np.float32)
    x[0], w[:8] = SMALLEST, SMALLEST
    w[:8, 64:] = -SMALLEST
    w[:8, 95] = np.float32(-1.0078125) * SMALLEST
    x[1, 32:64], w[:, 32:64] = -x[1, :32], w[:, :32]
    x[2, 50], x[3, 95], x[4, 0], x[5, 0] = np.inf, np.nan, 1e-38, 3.4e38
    w[9, 3], w[10, 4] = np.inf, np.nan
    out = np.zeros((19, 48), np.float32)
    expected = reference.bf16_matmul(x, w)
    product(form, x, w, out, accumulate=False)
    assert _same(out, expected)
    nonzero = np.abs(expected[expected != 0])
    assert np.nanmin(nonzero) >= np.finfo(np.float32).tiny
    assert np.isnan(expected[3]).all()


@pytest.mark.parametrize("form", FORMS)
def test_some_rows_of_a_product_have_the_bits_that_they_have_alone(form: str) -> None:
    generator = rng()
    x, w = normal(generator, 40, 70), normal(generator, 48, 70)
    together = np.zeros((40, 48), np.float32)
    product(form, x, w, together, accumulate=False)
    for low in (1, 17, 38):
        out = np.zeros((40, 48), np.float32)
        product(form, x, w, out, accumulate=False, low=low)
        assert not out[:low].any()
        assert np.array_equal(out[low:], together[low:])
    for row in (0, 20, 39):
        alone = np.zeros((1, 48), np.float32)
        product(form, np.ascontiguousarray(x[row : row + 1]), w, alone, accumulate=False)
        assert np.array_equal(alone[0], together[row])


def test_packing_keeps_every_rounded_weight() -> None:
    w = normal(rng(), 37, 70)
    panels = cpu.float32_panels(self_test.panels_for(w, "portable", 0).pairs, 70)
    assert panels.shape == (3, 70, 16)
    columns = panels.swapaxes(1, 2).reshape(48, 70)
    np.testing.assert_array_equal(columns[:37], reference.to_bfloat16(w))
    assert not columns[37:].any()


def test_a_form_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    check_forms_are_compared(monkeypatch, self_test, "bf16_matmul")


def test_amx_is_not_used_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "has_feature", lambda _: True)
    monkeypatch.setattr(self_test, "is_permitted", lambda: False)
    assert self_test.machine_forms() == ["avx512", "portable"]
    monkeypatch.setattr(self_test, "is_permitted", lambda: True)
    assert self_test.machine_forms() == ["amx", "avx512", "portable"]


@jit
def _multiply_between(config, seen, values, w, out):  # type: ignore[no-untyped-def]
    """A product while another program's configuration is loaded; `seen` is what is loaded afterwards."""
    amx._load_config(config.ctypes.data)
    amx.multiply_amx_panels(values, 0, out.shape[0], w, 0, w.shape[0], out, False)
    amx._store_config(seen.ctypes.data)


@pytest.mark.skipif("amx" not in FORMS, reason="executes AMX instructions")
def test_a_threads_tile_configuration_is_restored() -> None:
    panels, out = self_test.panels_for(normal(rng(), 32, 64), "amx", 20), np.zeros((20, 32), np.float32)
    other, none = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    other[0], other[16], other[48] = 1, 16, 3
    for config in (other, none):  # the last leaves the thread without one
        seen = np.full(64, 9, np.uint8)
        _multiply_between(config, seen, panels.rows.values, panels.pairs, out)
        np.testing.assert_array_equal(seen, config)
