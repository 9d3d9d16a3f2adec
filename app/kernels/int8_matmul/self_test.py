"""Chooses the form of the products in integers: the fastest that reproduces the reference's bits on this machine.

The test runs at every start, in milliseconds once its kernels are in the cache, because a cache may come from a
processor that reports the same features and is another one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.kernels.int8_matmul.cpu import multiply_dot_panels
from app.kernels.int8_matmul.pack_dot import pack_dot
from app.kernels.int8_matmul.quantise import new_rows
from app.kernels.int8_matmul.reference import int8_matmul
from app.kernels.int8_matmul.tiles import PANEL
from app.kernels.machine.jit import has_feature, jit
from app.kernels.machine.row_groups import round_rows
from app.kernels.machine.simd import GROUP
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul.int8 import Int8Panels

#: Forms, the fastest first, and LLVM's names of the features that each needs.
_NEEDS = {"avx512-vnni": ("avx512f", "avx512bw", "avx512vnni"), "avx2": ("avx2", "fma"), "portable": ()}
#: Rows that are held in registers and rows that pass by; depths of whole groups and of a part.
_ROWS, _DEPTHS = (1, 2, 3, 5, 9), (3 * GROUP, 2 * GROUP + 7)


@cache
def active_form() -> str | None:
    """The form to use on this machine; None if not even the portable one gives the reference's bits."""
    return next((form for form in machine_forms() if reproduces_reference(form)), None)


def machine_forms() -> list[str]:
    """The forms whose instructions this machine has, the fastest first."""
    return [form for form, features in _NEEDS.items() if all(has_feature(feature) for feature in features)]


def reproduces_reference(form: str) -> bool:
    """Whether a form gives the reference's bits for random and for extreme operands."""
    generator = np.random.default_rng(0)
    for most in (15, 255):
        for depth in _DEPTHS:
            for num_rows in _ROWS:
                for extreme in (False, True):
                    if not _is_equal(form, num_rows, depth, most, generator, extreme=extreme):
                        return False
    return True


def _is_equal(
    form: str, num_rows: int, depth: int, most: int, generator: np.random.Generator, *, extreme: bool
) -> bool:
    num_groups = -(-depth // GROUP)
    levels = generator.integers(0, most + 1, (2 * PANEL, depth)).astype(np.uint8)
    x = generator.standard_normal((num_rows, depth), np.float32)
    if extreme:  # sums as large as they can be, of either sign
        levels[:], x = most, np.where(np.arange(num_rows) % 2, np.float32(-3), np.float32(3))[:, None].repeat(depth, 1)
    levels[0, 0] = most
    scales, offsets = generator.standard_normal((2, 2 * PANEL, num_groups), np.float32)
    start = generator.standard_normal((num_rows, 2 * PANEL), np.float32)
    out, expected = start.copy(), int8_matmul(x, levels, scales, offsets, start)
    rows = new_rows(num_rows * num_groups * GROUP)
    stack = pack_dot(Int8Panels(_panels(levels)[None], _panels(scales)[None], _panels(offsets)[None]), form, rows)
    w = type(stack)(stack.levels[0], stack.scales[0], stack.offsets[0], rows)
    ThreadTeam(1).run(multiply_part, 2, x, 0, num_rows, w, 0, 2, out, True)
    return bool(np.array_equal(out.view(np.int32), expected.view(np.int32)))


def _panels(columns: NDArray[Any]) -> NDArray[Any]:
    """[N, K] -> [P, K, 16]."""
    return np.ascontiguousarray(columns.reshape(-1, PANEL, columns.shape[1]).swapaxes(1, 2))


@jit
def multiply_part(team, phase, x, low, high, w, first, end, out, accumulate):
    """out (+)= rows low to high of x @ panels first to end of w, on one thread. One phase."""
    phase = round_rows(team, phase, x, w.rows)
    multiply_dot_panels(w.rows, low, x.shape[0], w, first, end, out[low:high], accumulate)
    return phase
