"""Tiles of products: the order of sums that is promised, to the bit, in every shape; nothing outside the tile.

Numbers are integers, the rows' in 11 bits and the weights' in 23: their products, and a product added to a sum, are
exact in float64, so that NumPy can round each multiply-add once, as the definition has it.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.simd import (
    CHUNK,
    FETCH_BLOCK,
    FETCH_UNIT,
    GROUP,
    expand_bytes,
    multiply_and_expand_tile,
    multiply_and_fetch_tile,
    multiply_bytes_tile,
    multiply_tile,
    multiply_wide_tile,
)
from tests.kernels.cases import normal
from tests.pairwise import pairwise
from tests.seeds import rng

Floats = NDArray[np.float32]
#: None, one, sizes that divide nothing, whole chunks, and so many that several are summed side by side.
DEPTHS = (0, 1, GROUP - 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, 4 * CHUNK, 9 * CHUNK + 31)

_flat = multiply_tile(2, 3, 1)
_square = multiply_tile(3, 2, 2)
_tall = multiply_tile(5, 1, 2)
_chained = multiply_tile(2, 1, 2, 4)
_wide = multiply_wide_tile(2, 4, 3)
_fetching = multiply_and_fetch_tile(3)
_bytes = multiply_bytes_tile(3, fetches=False)
_fetching_bytes = multiply_bytes_tile(3, fetches=True)
_expanding = multiply_and_expand_tile(3)


@jit
def _run_flat(rows, x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate, in_bf16):  # type: ignore[no-untyped-def]
    _flat(rows, x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate, in_bf16)


@jit
def _run_square(rows, x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate, in_bf16):  # type: ignore[no-untyped-def]
    _square(rows, x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate, in_bf16)


@jit
def _run_tall(rows, x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate, in_bf16):  # type: ignore[no-untyped-def]
    _tall(rows, x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate, in_bf16)


@jit
def _run_chained(rows, x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate, in_bf16):  # type: ignore[no-untyped-def]
    _chained(rows, x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate, in_bf16)


@jit
def _run_wide(rows, x, x_row, w, w_k, w_panel, k, out, out_row, accumulate):  # type: ignore[no-untyped-def]
    _wide(rows, x, x_row, w, w_k, w_panel, k, out, out_row, 0, accumulate)


@jit
def _run_fetching(rows, x, x_row, w, w_k, k, out, out_row, accumulate, blocks, step, rate):  # type: ignore[no-untyped-def]
    _fetching(rows, x, x_row, w, w_k, k, out, out_row, 0, accumulate, blocks, step, rate)


@jit
def _run_bytes(rows, x, x_row, levels, scales, offsets, k, out, out_row, accumulate, blocks, rate):  # type: ignore[no-untyped-def]
    if rate > 0:
        _fetching_bytes(rows, x, x_row, levels, scales, offsets, k, out, out_row, accumulate, blocks, 0, rate)
    else:
        _bytes(rows, x, x_row, levels, scales, offsets, k, out, out_row, accumulate, 0, 0, 0)


@jit
def _run_expanding(rows, x, x_row, levels, scales, offsets, k, out, out_row, accumulate, expanded):  # type: ignore[no-untyped-def]
    _expanding(rows, x, x_row, levels, scales, offsets, k, out, out_row, accumulate, expanded)


@jit
def _run_expand_bytes(levels, scales, offsets, count, out):  # type: ignore[no-untyped-def]
    expand_bytes(levels, scales, offsets, count, out)


#: name -> (most rows, panels, float32 columns of one panel, function)
SHAPES: dict[str, tuple[int, int, int, Callable[..., None]]] = {
    "2 x 3 x 8": (2, 3, 8, _run_flat),
    "3 x 2 x 16": (3, 2, 16, _run_square),
    "5 x 1 x 16": (5, 1, 16, _run_tall),
    "2 x 1 x 16, chunks side by side": (2, 1, 16, _run_chained),
}


def integers(generator: np.random.Generator, bits: int, *shape: int) -> Floats:
    return generator.integers(-(1 << bits) + 1, 1 << bits, shape).astype(np.float32)


def defined(x: Floats, w: Floats, start: Floats | None) -> Floats:
    """[rows, columns] of x [rows, K] and w [K, columns]: chains of CHUNK from zero, added up in the order of k."""
    total = start
    for first in range(0, max(len(w), 1), CHUNK):
        chain = np.zeros((len(x), w.shape[1]), np.float32)
        for k in range(first, min(first + CHUNK, len(w))):
            exact = x[:, k, None].astype(np.float64) * w[k].astype(np.float64) + chain
            chain = exact.astype(np.float32)
        total = chain if total is None else total + chain
    assert total is not None
    return total


def surrounded(values: Floats, rows: int, columns: int) -> Floats:
    """`values` in the corner of NaN memory with more rows and columns."""
    memory = np.full((values.shape[0] + rows, values.shape[1] + columns), np.nan, np.float32)
    memory[: values.shape[0], : values.shape[1]] = values
    return memory


@pairwise({"depth": DEPTHS, "name": SHAPES}, strength=1)
def test_a_tile_is_its_definition_in_every_bit(name: str, depth: int) -> None:
    """Any number of rows that it takes, from zero and from what is there, with weights of four bytes and of two."""
    (most_rows, panels, width, run), generator = SHAPES[name], rng()
    for rows in range(1, most_rows + 1):
        accumulate, in_bf16 = bool(generator.integers(2)), bool(generator.integers(2))
        x = surrounded(integers(generator, 11, rows, depth), 1, 3)
        w = integers(generator, 23, depth, panels * width)
        start = integers(generator, 23, rows, panels * width)
        narrow = w.astype(ml_dtypes.bfloat16)
        packed = narrow if in_bf16 else w  # [K, panels * width]: a step's panels side by side
        out = surrounded(start, 2, 5)
        run(
            rows, x.ctypes.data, x.shape[1], packed.ctypes.data, panels * width, width, depth, out.ctypes.data,
            out.shape[1], width, 1 << 20, accumulate, in_bf16,
        )  # fmt: skip
        expected = defined(x[:rows, :depth], packed.astype(np.float32), start if accumulate else None)
        np.testing.assert_array_equal(out, surrounded(expected, 2, 5), f"{rows} rows, {accumulate=}, {in_bf16=}")


def test_the_definition_sees_another_order_of_sums() -> None:
    """One long chain, or chunks added up backwards, has other bits: the test above can fail."""
    generator, depth = rng(), 9 * CHUNK
    x, w = integers(generator, 11, 5, depth), integers(generator, 23, depth, 16)
    chain = np.zeros((5, 16), np.float32)
    for k in range(depth):
        chain = (x[:, k, None].astype(np.float64) * w[k] + chain).astype(np.float32)
    backwards = np.zeros((5, 16), np.float32)
    for first in reversed(range(0, depth, CHUNK)):
        backwards += defined(x[:, first : first + CHUNK], w[first : first + CHUNK], None)
    assert (defined(x, w, None) != chain).any()
    assert (defined(x, w, None) != backwards).any()


@pytest.mark.parametrize("name", SHAPES)
def test_more_rows_than_a_tile_takes_and_none_are_no_tile(name: str) -> None:
    most_rows, panels, width, run = SHAPES[name]
    x, w = np.ones((most_rows + 2, 4), np.float32), np.ones((4, panels * width), np.float32)
    for rows in (0, most_rows + 1, -1):
        out = np.full((most_rows + 2, panels * width), np.nan, np.float32)
        run(
            rows, x.ctypes.data, 4, w.ctypes.data, panels * width, width, 4, out.ctypes.data, panels * width, width,
            0, False, False,
        )  # fmt: skip
        assert np.isnan(out).all()


def test_panels_may_lie_apart() -> None:
    """Strides of steps and panels are the caller's: the same weights panel by panel, as `matmul` packs them."""
    generator, depth = rng(), 77
    x, w = normal(generator, 3, depth), normal(generator, depth, 32)
    together, apart = np.full((2, 3, 32), np.nan, np.float32)
    _run_square(
        3, x.ctypes.data, depth, w.ctypes.data, 32, 16, depth, together.ctypes.data, 32, 16, 0, False, False
    )  # fmt: skip
    panels = np.ascontiguousarray(w.reshape(depth, 2, 16).transpose(1, 0, 2))
    split = np.full((2, 3, 16), np.nan, np.float32)
    _run_square(
        3, x.ctypes.data, depth, panels.ctypes.data, 16, depth * 16, depth, split.ctypes.data, 16, 48, 0, False, False
    )  # fmt: skip
    apart[:] = split.transpose(1, 0, 2).reshape(3, 32)
    np.testing.assert_array_equal(apart, together)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_wide_tile_is_its_definition_in_every_bit(depth: int) -> None:
    """Of two to four rows; with one it does nothing."""
    generator = rng()
    panels = integers(generator, 23, 3, depth, 16)
    w = np.concatenate([*panels], axis=1)
    for rows in (1, 2, 3, 4):
        for accumulate in (False, True):
            x, start = surrounded(integers(generator, 11, rows, depth), 1, 3), integers(generator, 23, rows, 48)
            out = surrounded(start, 1, 5)
            _run_wide(
                rows, x.ctypes.data, x.shape[1], panels.ctypes.data, 16, depth * 16, depth, out.ctypes.data, 53,
                accumulate,
            )  # fmt: skip
            expected = start if rows == 1 else defined(x[:rows, :depth], w, start if accumulate else None)
            np.testing.assert_array_equal(out, surrounded(expected, 1, 5))


def _fetch_list(num_blocks: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Memory to ask for, and the list of its blocks in any order."""
    memory = np.zeros(num_blocks * FETCH_BLOCK, np.uint8)
    return memory, memory.ctypes.data + rng().permutation(num_blocks).astype(np.int64) * FETCH_BLOCK


@pytest.mark.parametrize("depth", DEPTHS)
def test_fetching_changes_no_bit_and_no_byte_of_what_is_fetched(depth: int) -> None:
    generator = rng()
    memory, blocks = _fetch_list(depth * 64 // FETCH_BLOCK + 2)
    memory[:] = 7
    for rows, rate in ((1, 1), (2, FETCH_UNIT // 3), (3, FETCH_UNIT)):
        x, w = integers(generator, 11, rows, depth), integers(generator, 23, depth, 16)
        start = integers(generator, 23, rows, 16)
        for accumulate in (False, True):
            out = surrounded(start, 1, 2)
            _run_fetching(
                rows, x.ctypes.data, depth, w.ctypes.data, 16, depth, out.ctypes.data, 18, accumulate,
                blocks.ctypes.data, 1, rate,
            )  # fmt: skip
            np.testing.assert_array_equal(out, surrounded(defined(x, w, start if accumulate else None), 1, 2))
    assert (memory == 7).all()


class Stored:
    """Random weights in bytes, [K, 16]: scale * level + offset of each group, integers of at most 23 bits."""

    def __init__(self, generator: np.random.Generator, depth: int) -> None:
        groups = -(-depth // GROUP)
        self.levels = generator.integers(0, 256, (depth, 16)).astype(np.uint8)
        self.scales, self.offsets = integers(generator, 14, groups, 16), integers(generator, 21, groups, 16)
        grid = np.arange(depth) // GROUP
        self.expanded = (self.scales[grid] * self.levels.astype(np.float64) + self.offsets[grid]).astype(np.float32)

    def addresses(self) -> tuple[int, int, int]:
        return self.levels.ctypes.data, self.scales.ctypes.data, self.offsets.ctypes.data


@pytest.mark.parametrize("depth", DEPTHS)
def test_bytes_give_the_bits_of_what_they_expand_to(depth: int) -> None:
    generator = rng()
    memory, blocks = _fetch_list(depth * 64 // FETCH_BLOCK + 2)
    w = Stored(generator, depth)
    for rows in (1, 2, 3):
        x, start = integers(generator, 11, rows, depth), integers(generator, 23, rows, 16)
        for accumulate, rate in ((False, 0), (True, 0), (False, FETCH_UNIT), (True, 9)):
            out = surrounded(start, 1, 2)
            _run_bytes(
                rows, x.ctypes.data, depth, *w.addresses(), depth, out.ctypes.data, 18, accumulate,
                blocks.ctypes.data, rate,
            )  # fmt: skip
            np.testing.assert_array_equal(out, surrounded(defined(x, w.expanded, start if accumulate else None), 1, 2))
    assert not memory.any()


@pytest.mark.parametrize("depth", [depth for depth in DEPTHS if 0 < depth <= CHUNK])
def test_expanded_weights_are_left_for_further_rows(depth: int) -> None:
    generator = rng()
    w = Stored(generator, depth)
    for rows in (1, 2, 3):
        x = integers(generator, 11, rows, depth)
        out, expanded = np.full((rows, 16), np.nan, np.float32), np.full((depth + 1, 16), np.nan, np.float32)
        _run_expanding(
            rows, x.ctypes.data, depth, *w.addresses(), depth, out.ctypes.data, 16, False, expanded.ctypes.data
        )
        np.testing.assert_array_equal(out, defined(x, w.expanded, None))
        np.testing.assert_array_equal(expanded[:depth], w.expanded)
        assert np.isnan(expanded[depth]).all()


@pytest.mark.parametrize("count", [0, 1, 5, GROUP])
def test_a_group_is_expanded_with_one_rounding(count: int) -> None:
    """Scales of 23 bits: a product of 31 bits is rounded together with the offset, not before."""
    generator = rng()
    levels = generator.integers(0, 256, (count, 16)).astype(np.uint8)
    scales, offsets = integers(generator, 23, 16), integers(generator, 23, 16)
    out = np.full((count + 1, 16), np.nan, np.float32)
    _run_expand_bytes(levels.ctypes.data, scales.ctypes.data, offsets.ctypes.data, count, out.ctypes.data)
    exact = scales.astype(np.float64) * levels + offsets
    np.testing.assert_array_equal(out[:count], exact.astype(np.float32))
    assert np.isnan(out[count]).all()
