"""Scalars in compiled code: the exponential against float64 over its whole range, and bits that survive a cast."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.scalar_math import exp_float32, float_from_bits
from app.kernels.machine.vectors import EXP_MAX, EXP_MIN
from tests.seeds import rng

Floats = NDArray[np.float32]
_TINY = np.finfo(np.float32).smallest_subnormal


@jit
def _exponentials(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        out[i] = exp_float32(x[i])


@jit
def _cast(bits, out):  # type: ignore[no-untyped-def]
    for i in range(bits.shape[0]):
        out[i] = float_from_bits(bits[i])


def exponentials(x: Floats) -> Floats:
    """Into memory full of NaN."""
    out = np.full(len(x), np.nan, np.float32)
    _exponentials(x, out)
    return out


def units_off(x: Floats, found: Floats) -> NDArray[np.float64]:
    """Distance from the exact e**x, in units of the last place of the float32 nearest to it."""
    exact = np.exp(x.astype(np.float64))
    off: NDArray[np.float64] = np.abs(found - exact) / np.spacing(exact.astype(np.float32))
    return off


def _around(centre: float, steps: int = 200) -> Floats:
    """The float32 numbers next to `centre`, on both sides."""
    below = above = np.float32(centre)
    found = [below]
    for _ in range(steps):
        below, above = np.nextafter(below, np.float32(-np.inf)), np.nextafter(above, np.float32(np.inf))
        found += [below, above]
    return np.clip(np.array(found, np.float32), EXP_MIN, EXP_MAX)


RANGES = {
    "all of it": (-87.3, 88.0),
    "around zero": (-1e-3, 1e-3),
    "one period of the reduction": (-0.35, 0.35),
    "probabilities": (-20.0, 0.0),
    "the smallest results": (-87.3, -86.0),
    "the largest results": (87.0, 88.0),
}


@pytest.mark.parametrize("name", RANGES)
def test_exp_is_within_two_units_in_the_last_place(name: str) -> None:
    x = rng().uniform(*RANGES[name], 20_000).astype(np.float32)
    x = np.clip(x, EXP_MIN, EXP_MAX)
    assert units_off(x, exponentials(x)).max() <= 2


@pytest.mark.parametrize("n", [-125, -64, -2, -1, 0, 1, 2, 63, 125])
def test_exp_is_as_near_where_the_power_of_two_changes(n: int) -> None:
    """Half way between multiples of ln 2 the reduction takes the next power: an error of one there is a factor of 2."""
    x = np.concatenate([_around((n + 0.5) * np.log(2)), _around(n * np.log(2))])
    assert units_off(x, exponentials(x)).max() <= 2


def test_the_measure_of_the_error_sees_three_units() -> None:
    x = rng().uniform(-80, 80, 1000).astype(np.float32)
    found = exponentials(x)
    assert units_off(x, found + 4 * np.spacing(found)).min() > 2


def test_exp_of_zero_and_of_what_is_next_to_nothing_is_one() -> None:
    tiny = np.finfo(np.float32).tiny
    x = np.array([0.0, -0.0, _TINY, -_TINY, tiny, -tiny, tiny / 2, -tiny / 2, 1e-30, -1e-30], np.float32)
    np.testing.assert_array_equal(exponentials(x), np.ones(len(x), np.float32))


def test_exp_stops_at_its_ends() -> None:
    """Neither zero nor infinity: what lies beyond an end gives that end's value, in every bit."""
    low, high = exponentials(np.array([EXP_MIN, EXP_MAX], np.float32))
    assert low >= np.finfo(np.float32).tiny  # no denormal, which some processors compute slowly
    assert np.isfinite(high)
    below = np.array([-87.4, -88, -100, -1e4, -3e38, -np.inf], np.float32)
    above = np.array([88.1, 88.7, 89, 1e4, 3e38, np.inf], np.float32)
    np.testing.assert_array_equal(exponentials(below), np.full(len(below), low))
    np.testing.assert_array_equal(exponentials(above), np.full(len(above), high))


def test_an_element_has_the_same_bits_in_a_loop_of_vectors_and_alone() -> None:
    x = (rng().standard_normal(1003) * 30).astype(np.float32)
    together = exponentials(x)
    for i in range(len(x)):
        assert exp_float32(x[i]) == together[i], x[i]
    for cut in (1, 7, 8, 9, 33):
        np.testing.assert_array_equal(exponentials(x[cut:]), together[cut:])


def test_bits_come_through_a_cast_unchanged() -> None:
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, _TINY, -_TINY, 3.4e38], np.float32)
    patterns = [special.view(np.int32), np.array([0x7FC00001, -0x003FFFFF, 0x007FFFFF, 1, -1], np.int32)]
    bits = np.concatenate([*patterns, rng().integers(-(2**31), 2**31, 5000).astype(np.int32)])
    out = np.zeros(len(bits), np.float32)
    _cast(bits, out)
    np.testing.assert_array_equal(out.view(np.int32), bits)
    np.testing.assert_array_equal(out, bits.view(np.float32))
