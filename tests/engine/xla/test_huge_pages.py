"""Huge pages are asked for inside an array's own memory only, and its values stay."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from app.engine.xla.huge_pages import use_huge_pages

_HUGE_PAGE = 1 << 21


def test_values_stay_and_only_whole_pages_of_the_array_are_asked_for() -> None:
    rng, memory = np.random.default_rng(), _fresh(12 * _HUGE_PAGE)
    first, size = int(rng.integers(1, 2 * _HUGE_PAGE)), int(rng.integers(4 * _HUGE_PAGE, 6 * _HUGE_PAGE))
    memory[:] = rng.integers(0, 256, len(memory), np.uint8)
    expected, start = memory.copy(), memory.ctypes.data + first
    use_huge_pages(start, size)
    assert np.array_equal(memory, expected)

    asked = _asked_for(memory)
    if Path("/sys/kernel/mm/transparent_hugepage").exists():  # else the kernel has none to ask for
        assert len(asked) == 1
    for low, high in asked:
        assert low % _HUGE_PAGE == high % _HUGE_PAGE == 0
        assert start <= low < start + _HUGE_PAGE
        assert start + size - _HUGE_PAGE < high <= start + size


@pytest.mark.parametrize("size", [0, 1, _HUGE_PAGE])
def test_small_arrays_are_left_alone(size: int) -> None:
    memory = _fresh(4 * _HUGE_PAGE)
    use_huge_pages(memory.ctypes.data, size)
    assert not _asked_for(memory)


def _fresh(size: int) -> NDArray[np.uint8]:
    """Zeros [size] for which nobody has asked for huge pages; NumPy does for its own."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _asked_for(memory: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Parts of some memory of this process with the flag `hg`, proc(5)."""
    if not sys.platform.startswith("linux"):
        return []
    start, end = memory.ctypes.data, memory.ctypes.data + len(memory)
    areas, area = [], (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            low, _, high = name.partition("-")
            area = max(int(low, 16), start), min(int(high, 16), end)
        elif name == "VmFlags:" and "hg" in values and area[0] < area[1]:
            areas.append(area)
    return areas
