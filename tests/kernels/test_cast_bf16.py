"""Rows rounded on their way to a device: the definition's bits at every column, and nothing written elsewhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.cast_bf16 import reference
from app.kernels.cast_bf16.cpu import round_rows, store_row, tasks_of, widen_row
from tests.kernels.cases import normal
from tests.seeds import rng

#: A float32 halfway between two bfloat16, the even one below or above it; next to halfway; numbers that are bfloat16.
EDGES = np.array(
    [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF808000, 0xBF818000, 0x00008000, 0x00018000, 0x00000000,
     0x80000000, 0x3F800000, 0x7F7F7FFF, 0x00000001, 0x807FFFFF],
    np.uint32,
).view(np.float32)  # fmt: skip
Bits = type[np.uint16] | type[np.uint32]
Buffer = NDArray[np.unsignedinteger]
POISON: dict[Bits, int] = {np.uint16: 0xABCD, np.uint32: 0xABCDABCD}


def filled(parts: list[tuple[NDArray[np.float32], int]], first: int, end: int, row_size: int, kind: Bits) -> Buffer:
    """What `round_rows` makes of a buffer full of poison, with a row of poison behind it."""
    buffer: Buffer = np.full((end - first + 1) * row_size, POISON[kind], kind)
    round_rows(tasks_of(parts), first, end, row_size, buffer)
    assert (buffer[(end - first) * row_size :] == POISON[kind]).all()
    return buffer[: (end - first) * row_size].reshape(end - first, row_size)


def test_the_definition_is_the_libraries() -> None:
    values = np.concatenate([EDGES, normal(rng(), 500), normal(rng(), 500) * np.float32(1e30)])
    expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(reference.bfloat16_bits(values), expected)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 64])
def test_a_row_is_stored_rounded_or_as_it_is_and_read_again(size: int) -> None:
    """Side by side and apart, as values and keys lie in KV memory; infinities and NaNs stay what they are."""
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, 3.4e38], np.float32)
    row = np.concatenate([EDGES, special, normal(rng(), 64)])[rng().permutation(64)[:size]]
    expected = reference.bfloat16_bits(row)
    narrow, wide = np.full((2, 80, 3), 0xABCD, np.uint16), np.full((80, 3), 7, np.float32)
    for out in (narrow[0].reshape(-1), narrow[1, :, 1]):
        store_row(row, out)
        np.testing.assert_array_equal(out[:size], expected)
        assert (out[size:] == 0xABCD).all()
    assert (narrow[1, :, ::2] == 0xABCD).all()
    store_row(row, wide[:, 1])
    np.testing.assert_array_equal(wide[:size, 1].view(np.uint32), row.view(np.uint32))
    assert (wide[size:] == 7).all()
    widened = np.full(80, 7, np.float32)
    widen_row(expected, widened)
    np.testing.assert_array_equal(widened[:size].view(np.uint32), expected.astype(np.uint32) << 16)
    assert (widened[size:] == 7).all()


@pytest.mark.parametrize("width", [1, 7, 8, 33])
def test_every_row_lands_in_its_columns(width: int) -> None:
    """Two matrices of different heights side by side, some of whose rows are asked for."""
    generator = rng()
    tall, short = normal(generator, 9, width), normal(generator, 4, 5)
    row_size, first, end = width + 9, 2, 7
    parts = [(tall, 1), (short, width + 3)]
    for kind in (np.uint16, np.uint32):
        found = filled(parts, first, end, row_size, kind)
        expected = np.full_like(found, POISON[kind])
        for matrix, column in parts:
            rows = matrix[first:end]
            bits = reference.bfloat16_bits(rows) if kind is np.uint16 else rows.view(np.uint32)
            expected[: len(rows), column : column + rows.shape[1]] = bits
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_numbers_halfway_go_to_the_even_neighbour(times: int) -> None:
    """In whole vectors, and in what is left over behind them."""
    values = np.tile(EDGES, times)[None]
    np.testing.assert_array_equal(filled([(values, 0)], 0, 1, values.size, np.uint16), reference.bfloat16_bits(values))
    np.testing.assert_array_equal(filled([(values, 0)], 0, 1, values.size, np.uint32), values.view(np.uint32))


def test_nothing_to_round_writes_nothing() -> None:
    assert tasks_of([]).shape == (0, 4)
    assert (filled([], 0, 2, 8, np.uint16) == POISON[np.uint16]).all()
    rows = np.ones((3, 4), np.float32)
    assert (filled([(rows, 0)], 3, 6, 8, np.uint32) == POISON[np.uint32]).all(), "its rows end before"
    assert (filled([(rows[:, :0], 0)], 0, 3, 8, np.uint32) == POISON[np.uint32]).all(), "no columns"
