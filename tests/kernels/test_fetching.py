"""What products ask memory for on their way: all that is read next, nothing twice, and the same bits as without."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.simd import FETCH_BLOCK
from app.kernels.matmul import cpu, int8, pack_weights
from app.kernels.sgmv.cpu import ModuleRows
from app.kernels.sgmv.prefetch import MOST_BLOCKS, NextShrink, list_fetch, shrink_ranges
from tests.kernels.cases import normal
from tests.seeds import rng

Lines = NDArray[np.int64]
Stack = NDArray[np.float32] | int8.Int8Panels


@jit
def _multiply(x, w, out, blocks, lines):  # type: ignore[no-untyped-def]
    fetch = cpu.Fetch(np.int64(blocks), lines)
    int8.multiply_any_panels(x, w, 0, int8.num_panels_of(w), out, False, fetch)


def _weights(generator: np.random.Generator, num_columns: int, depth: int, quantised: bool) -> Stack:
    w = normal(generator, num_columns, depth)
    return pack_weights.quantise(w) if quantised else cpu.pack(w)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_list_changes_no_bits(quantised: bool) -> None:
    generator = rng()
    w = _weights(generator, 120, 130, quantised)
    wanted = np.zeros(1 << 16, np.uint8)
    blocks = np.arange(wanted.ctypes.data, wanted.ctypes.data + wanted.size, FETCH_BLOCK)
    for num_rows in (1, 3, 4, 8, 9, 16, 17, 33, cpu.MOST_FETCHING, cpu.MOST_FETCHING + 1):
        x = normal(generator, num_rows, 130)
        plain, fetching = np.zeros((2, num_rows, 128), np.float32)
        _multiply(x, w, plain, 0, 0)
        _multiply(x, w, fetching, blocks.ctypes.data, len(blocks) * 4)
        assert np.array_equal(plain, fetching)


def read_a_list_before_forbidden_memory() -> None:
    """Products whose list ends where a page ends that nobody may read: one entry too far ends the process."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + page), page, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    entries = np.frombuffer(memory, np.int64, page // 8)
    entries[:] = entries.ctypes.data
    generator = rng()
    for in_8_bits in (False, True):
        for num_rows in (1, 2, 4, 5, 8, 9, 14, 15, 16, 17, 22, 23, 64):
            for columns, depth in ((16, 32), (50, 33), (35, 300), (1, 1)):
                x = normal(generator, num_rows, depth)
                out = np.zeros((num_rows, -(-columns // 16) * 16), np.float32)
                for count in (1, 2, 3, 50, 512):
                    at = start + page - count * 8
                    _multiply(x, _weights(generator, columns, depth, in_8_bits), out, at, count * 4)


def test_nothing_behind_a_list_is_read() -> None:
    script = "from tests.kernels.test_fetching import read_a_list_before_forbidden_memory as run; run()"
    subprocess.run([sys.executable, "-c", script], check=True)


def _covered(blocks: Lines) -> set[int]:
    """Addresses of the pairs of bytes in blocks."""
    return {at for block in blocks.tolist() for at in range(block, block + FETCH_BLOCK, 2)}


def test_pieces_list_every_row_that_is_read_next() -> None:
    generator = rng()
    widths, depth, starts = (48, 16), 72, np.array([0, 0, 16, 24, 64])
    ranks = np.array([[0, 0], [5, 8], [8, 0], [33, 37], [1, 16]], np.int32)
    in_bf16 = generator.integers(0, 2, 5).astype(np.bool_)
    b = tuple(np.zeros((128, width), np.float32) for width in widths)
    a = tuple(np.zeros((16, depth, 8), np.float32) for _ in widths)
    runs = np.array([(0, 2, 1), (2, 3, 3), (3, 9, 4), (9, 10, 2)])
    num_panels = sum(widths) // 16
    at_a = np.stack([table.ctypes.data + starts * depth * 4 for table in a], axis=1)
    at_b = np.stack([table.ctypes.data + starts * width * 4 for table, width in zip(b, widths, strict=True)], axis=1)
    own = ModuleRows(at_a, at_b, ranks, np.array(widths) // 16, in_bf16)
    soon = shrink_ranges(NextShrink(at_a, ranks, np.array([depth, depth]), in_bf16), runs)

    of_a: set[int] = set()
    for slot in (1, 2, 3, 4):
        for n, rows in enumerate(a):
            size = -(-ranks[slot, n] // 8) * 8 * depth * (2 if in_bf16[slot] else 4)
            first = rows.ctypes.data + starts[slot] * depth * 4
            of_a.update(range(first, first + size, 2))
    listed: list[Lines] = []
    cuts = [0, *sorted(generator.integers(0, num_panels + 1, 2).tolist()), num_panels]
    for first, end in pairwise(cuts):
        blocks = np.zeros(MOST_BLOCKS, np.int64)
        fetch = list_fetch(own, runs, first, end, num_panels, soon, blocks)
        assert fetch.blocks == blocks.ctypes.data
        listed.append(blocks[: fetch.lines * 64 // FETCH_BLOCK])
        covered, at = _covered(listed[-1]), 0
        for n, width in enumerate(widths):
            low, high = max(first - at, 0), min(end - at, width // 16)
            for slot in (1, 2, 3, 4) if low < high else ():
                panel = int(ranks[slot, n]) * 16 * (2 if in_bf16[slot] else 4)
                rows = b[n].ctypes.data + int(starts[slot]) * width * 4
                assert covered.issuperset(range(rows + low * panel, rows + high * panel, 2))
            at += width // 16
    everything = np.concatenate(listed)
    assert _covered(everything) >= of_a
    begins, ends = [rows.ctypes.data for rows in a], [rows.ctypes.data + rows.nbytes for rows in a]
    shares = [block for block in everything.tolist() if any(map(lambda lo, hi: lo <= block < hi, begins, ends))]
    assert len(shares) == len(set(shares))


def test_a_long_list_is_cut() -> None:
    b, ranks = np.zeros((512, 1600), np.float32), np.array([[0], [512]], np.int32)
    at = np.array([[0], [b.ctypes.data]])
    rows = ModuleRows(at, at, ranks, np.array([100]), np.zeros(2, np.bool_))
    blocks = np.zeros(MOST_BLOCKS, np.int64)
    none = np.empty((0, 2), np.int64)
    fetch = list_fetch(rows, np.array([(0, 1, 1)]), 0, 100, 100, none, blocks)
    assert fetch.lines * 64 == MOST_BLOCKS * FETCH_BLOCK
    assert np.array_equal(blocks, b.ctypes.data + np.arange(MOST_BLOCKS) * FETCH_BLOCK)
