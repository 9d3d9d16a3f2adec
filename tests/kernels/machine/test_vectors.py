"""Vectors in compiled code against NumPy: lane by lane, to the bit, in every width and for numbers of every kind."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from app.kernels.machine import vectors
from app.kernels.machine.jit import jit
from app.kernels.machine.vectors import EXP_MAX, EXP_MIN, FLOAT, INT, LANES, WORD
from tests.seeds import rng

Floats = NDArray[np.float32]
#: What `_lanewise` computes, in the order in which it stores it.
LANEWISE = ("copy", "fma", "exp", "greater", "plus", "constant", "spread")
#: Lanes of vectors that LLVM splits or pads to what the machine has.
BUCKET_SIZES = (4, 8, 16, 32)
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754944e-38, 3.4e38, -3.4e38, 0.1, 16777217.0],
    np.float32,
)


@intrinsic
def _emit_lanewise(typingctx: Any, a: Any, b: Any, c: Any, out: Any) -> Any:  # noqa: ARG001  (Numba reads them)
    """Each of LANEWISE of the vectors at addresses a, b and c, one after the other at `out`."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        x, y, z = (vectors.load(builder, at, WORD(0)) for at in args[:3])
        found = (
            x,
            vectors.fma(builder, x, y, z),
            vectors.exp(builder, x),
            vectors.greater(builder, x, y),
            vectors.plus(builder, x, y),
            vectors.constant(np.float32(0.1)),
            vectors.spread(builder, builder.extract_element(x, INT(3))),
        )
        vectors.prefetch(builder, WORD(0))  # of an address that is nobody's: nothing happens
        for number, value in enumerate(found):
            vectors.store(builder, value, args[3], WORD(number * LANES))
        return context.get_dummy_value()

    return types.void(*([types.intp] * 4)), codegen


@jit
def _lanewise(a, b, c, out):  # type: ignore[no-untyped-def]
    for i in range(a.shape[0]):
        _emit_lanewise(a[i].ctypes.data, b[i].ctypes.data, c[i].ctypes.data, out[i].ctypes.data)


@intrinsic
def _emit_joined(typingctx: Any, values: Any, out: Any) -> Any:  # noqa: ARG001  (Numba reads them)
    """Of 1, 2, 4 and 8 vectors their sum and their maximum, and the first lane's of either across the lanes."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        values = [vectors.load(builder, args[0], WORD(i * LANES)) for i in range(8)]
        number = 0
        for count in (1, 2, 4, 8):
            for join in (vectors.plus, vectors.greater):
                whole = vectors.tree(builder, values[:count], join)
                one = vectors.spread(builder, vectors.across(builder, whole, join))
                for value in (whole, one):
                    vectors.store(builder, value, args[1], WORD(number * LANES))
                    number += 1
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@jit
def _joined(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.shape[0]):
        _emit_joined(values[i].ctypes.data, out[i].ctypes.data)


@intrinsic
def _emit_widths(typingctx: Any, halves: Any, a: Any, out: Any) -> Any:  # noqa: ARG001  (Numba reads them)
    """For each of WIDTHS: bfloat16 values widened, times a spread number plus themselves."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        halves, a, out = args
        factor = builder.load(vectors.place(builder, a, WORD(0), FLOAT))
        at = 0
        for width in BUCKET_SIZES:
            kind = ir.VectorType(FLOAT, width)
            wide = vectors.load_bf16(builder, halves, kind)
            scaled = vectors.fma(builder, wide, vectors.spread(builder, factor, kind), wide)
            for value in (wide, scaled):
                builder.store(value, vectors.place(builder, out, WORD(at), kind), align=4)
                at += width
        return context.get_dummy_value()

    return types.void(*([types.intp] * 3)), codegen


@jit
def _widths(halves, a, out):  # type: ignore[no-untyped-def]
    for i in range(halves.shape[0]):
        _emit_widths(halves[i].ctypes.data, a[i].ctypes.data, out[i].ctypes.data)


def lanewise(a: Floats, b: Floats, c: Floats) -> dict[str, Floats]:
    """Every operation's results, [rows, LANES]; the row behind the last is left alone."""
    out = np.full((len(a) + 1, len(LANEWISE), LANES), np.nan, np.float32)
    before = out[-1].tobytes()
    _lanewise(a, b, c, out[:-1])
    assert out[-1].tobytes() == before
    return {name: out[:-1, number] for number, name in enumerate(LANEWISE)}


def _operands(num_rows: int) -> tuple[Floats, Floats, Floats]:
    """Numbers of all sizes, a fifth of them special."""
    generator = rng()
    shape = 3, num_rows, LANES
    values = (generator.standard_normal(shape) * 10.0 ** generator.integers(-30, 30, shape)).astype(np.float32)
    chosen = generator.random(shape) < 0.2
    values[chosen] = generator.choice(SPECIAL, int(chosen.sum()))
    return values[0], values[1], values[2]


def _fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once, by the C library."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    flat = [fmaf(*terms) for terms in zip(a.ravel().tolist(), b.ravel().tolist(), c.ravel().tolist(), strict=True)]
    return np.array(flat, np.float32).reshape(a.shape)


def test_what_is_stored_is_what_was_loaded() -> None:
    a, b, c = _operands(200)
    np.testing.assert_array_equal(lanewise(a, b, c)["copy"].view(np.int32), a.view(np.int32))


def test_a_fused_multiply_add_rounds_once() -> None:
    a, b, c = _operands(300)
    near = rng().standard_normal((3, 300, LANES)).astype(np.float32)
    near[2] = -near[0] * near[1]  # what is left is the product's rounding error: two roundings would give zero
    for operands in ((a, b, c), (near[0], near[1], near[2])):
        np.testing.assert_array_equal(lanewise(*operands)["fma"], _fused(*operands))
    assert np.count_nonzero(lanewise(near[0], near[1], near[2])["fma"]) > 0


def test_sums_are_float32_sums() -> None:
    a, b, c = _operands(300)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(lanewise(a, b, c)["plus"], a + b)


def test_the_greater_of_two_is_the_second_one_beside_nan() -> None:
    a, b, c = _operands(300)
    found = lanewise(a, b, c)["greater"]
    np.testing.assert_array_equal(found, np.where(a > b, a, b))
    assert np.array_equal(np.isnan(found), np.isnan(b))


def test_a_constant_and_a_spread_number_fill_every_lane() -> None:
    a, b, c = _operands(50)
    found = lanewise(a, b, c)
    assert (found["constant"] == np.float32(0.1)).all()
    np.testing.assert_array_equal(found["spread"], np.repeat(a[:, 3:4], LANES, axis=1))


@pytest.mark.parametrize(("low", "high"), [(-87.3, 88.0), (-1.0, 1.0), (-1e-4, 1e-4), (-87.3, -86.5), (87.5, 88.0)])
def test_exp_is_within_two_units_in_the_last_place(low: float, high: float) -> None:
    x = np.clip(rng().uniform(low, high, (2000, LANES)).astype(np.float32), EXP_MIN, EXP_MAX)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(lanewise(x, x, x)["exp"] - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


def test_exp_stops_at_its_ends_and_gives_nan_the_lower_one() -> None:
    ends = np.array([[EXP_MIN, EXP_MAX, 0.0, -0.0, 1e-45, -1e-45, 0, 0]], np.float32)
    low, high, *ones = lanewise(ends, ends, ends)["exp"][0]
    assert ones == [1.0] * 6
    assert np.finfo(np.float32).tiny <= low < high < np.inf
    beyond = np.array([[-88, -np.inf, -3e38, np.nan, 88.5, np.inf, 3e38, -np.nan]], np.float32)
    np.testing.assert_array_equal(lanewise(beyond, beyond, beyond)["exp"][0], [*[low] * 4, *[high] * 3, low])


def test_a_lane_knows_nothing_of_its_neighbours() -> None:
    a, b, c = _operands(100)
    turned = [np.roll(values, 3, axis=1) for values in (a, b, c)]
    found, again = lanewise(a, b, c), lanewise(*turned)
    for name in ("copy", "fma", "exp", "greater", "plus"):
        np.testing.assert_array_equal(np.roll(found[name], 3, axis=1).view(np.int32), again[name].view(np.int32))


def _tree(values: list[Floats], join: Any) -> Floats:
    """Neighbours first, then pairs of neighbours."""
    while len(values) > 1:
        values = [join(first, second) for first, second in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _across(values: Floats, join: Any) -> Floats:
    """Halves first: lanes 0 and 4, 1 and 5, …"""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = join(values[:, :half], values[:, half:])
    return values


def test_vectors_and_lanes_are_joined_in_one_order() -> None:
    values = (rng().standard_normal((200, 8, LANES)) * 10.0 ** rng().integers(-4, 4, (200, 8, LANES))).astype(
        np.float32
    )
    out = np.full((200, 16, LANES), np.nan, np.float32)
    _joined(values, out)
    number = 0
    for count in (1, 2, 4, 8):
        for join in (np.add, np.maximum):
            whole = _tree([values[:, i] for i in range(count)], join)
            np.testing.assert_array_equal(out[:, number], whole)
            np.testing.assert_array_equal(out[:, number + 1], np.repeat(_across(whole, join), LANES, axis=1))
            number += 2
    in_order = np.add.accumulate(values[:, :, 0], axis=1, dtype=np.float32)[:, -1]
    assert (in_order != out[:, 12, 0]).any(), "another order of the same terms has other bits, which this would see"


def test_every_bfloat16_is_widened_to_the_bit_in_every_width() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(-1, max(BUCKET_SIZES))
    halves = halves[:, rng().permutation(max(BUCKET_SIZES))].copy()
    factors = rng().standard_normal((len(halves), 1)).astype(np.float32)
    out = np.zeros((len(halves), 2 * sum(BUCKET_SIZES)), np.float32)
    _widths(halves, factors, out)
    wide, at = halves.view(ml_dtypes.bfloat16).astype(np.float32), 0
    for width in BUCKET_SIZES:
        found, scaled = out[:, at : at + width], out[:, at + width : at + 2 * width]
        np.testing.assert_array_equal(found.view(np.uint32), halves[:, :width].astype(np.uint32) << 16)
        np.testing.assert_array_equal(found, wide[:, :width])
        finite = np.isfinite(found).all(axis=1)
        repeated = np.repeat(factors[finite], width, axis=1)
        np.testing.assert_array_equal(scaled[finite], _fused(found[finite], repeated, found[finite]))
        at += 2 * width
