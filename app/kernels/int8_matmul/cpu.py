"""Matrix products in 8-bit integers on the CPU: rows are quantised, then multiplied by weights as they are stored.

Batch-invariant: a row's levels depend on the row alone, and its sums have one order (see `reference`). Weights are
packed for one form of the tile, which is a part of their type, so that a decoder is compiled for the form that the
self-test has chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from app.kernels.int8_matmul.quantise import QuantisedRows
from app.kernels.int8_matmul.tiles import FORMS, PANEL, int8_panel
from app.kernels.machine.jit import jit
from app.kernels.machine.simd import GROUP

#: Rows that pass by a group's weights at a time: their sums stay in the first-level cache.
_MOST_ROWS = 128


class DotPanels(NamedTuple):
    """Weights for products in integers. Subclasses say which form of the tile and how many bits a level has.

    levels: [..., P, G, 4 or 8, 16, 4] uint8: quads of consecutive k by column. Of 4-bit levels, byte [q, c, j] holds
    number 4 q + j of the group in its lower bits and number 16 + 4 q + j in its upper ones. Levels past the depth are
    zero. scales, offsets: [..., P, G, 16] float32. rows: memory for the other factor, shared by all weights.
    """

    levels: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32]
    rows: QuantisedRows


class Avx2Panels4(DotPanels):
    """For AVX2, 4 bits a level."""


class Avx2Panels8(DotPanels):
    """For AVX2, 8 bits a level."""


class VnniPanels4(DotPanels):
    """For AVX-512 with VNNI, 4 bits a level."""


class VnniPanels8(DotPanels):
    """For AVX-512 with VNNI, 8 bits a level."""


class PortablePanels4(DotPanels):
    """For every processor, 4 bits a level."""


class PortablePanels8(DotPanels):
    """For every processor, 8 bits a level."""


#: Form -> bits of a level -> type of the weights.
PANELS_OF: dict[str, dict[int, type[DotPanels]]] = {
    "avx512-vnni": {4: VnniPanels4, 8: VnniPanels8},
    "avx2": {4: Avx2Panels4, 8: Avx2Panels8},
    "portable": {4: PortablePanels4, 8: PortablePanels8},
}
assert PANELS_OF.keys() == FORMS.keys(), "each form has types"
_KIND = {panels: (form, bits) for form, by_bits in PANELS_OF.items() for bits, panels in by_bits.items()}


def is_dot(w: Any) -> bool:
    """Whether a Numba type of weights is for products in integers."""
    return isinstance(w, types.BaseNamedTuple) and w.instance_class in _KIND


def _panel(w, values, x_scales, x_sums, stride, num_rows, levels, scales, offsets, num_groups, out, dots):
    """`int8_panel` of w's form and bits."""
    raise NotImplementedError("called from compiled code only")


@overload(_panel)
def _panel_of(w, values, x_scales, x_sums, stride, num_rows, levels, scales, offsets, num_groups, out, dots):
    panel = int8_panel(*_KIND[w.instance_class])
    return lambda w, values, x_scales, x_sums, stride, num_rows, levels, scales, offsets, num_groups, out, dots: panel(  # noqa: ARG005
        values, x_scales, x_sums, stride, num_rows, levels, scales, offsets, num_groups, out, dots
    )


@jit
def multiply_dot_panels(rows, first_row, total_rows, w, first, end, out, accumulate):
    """out[:, 16 * first : 16 * end] (+)= some quantised rows @ panels first to end of w.

    rows: `QuantisedRows` of a product with total_rows rows; out: [T, >= 16 * end] float32, of the T rows from first_row
    on. One thread.
    """
    num_rows, num_groups = out.shape[0], w.scales.shape[1]
    sums, dots = np.empty((_MOST_ROWS, PANEL), np.float32), np.empty((_MOST_ROWS, PANEL), np.int32)
    for start in range(0, num_rows, _MOST_ROWS):
        count, at = min(_MOST_ROWS, num_rows - start), first_row + start
        for panel in range(first, end):
            grid = panel * num_groups * PANEL * 4
            _panel(
                w, rows.levels.ctypes.data + at * GROUP, rows.scales.ctypes.data + at * 4,
                rows.sums.ctypes.data + at * 4, total_rows, count, w.levels.ctypes.data + panel * w.levels.strides[0],
                w.scales.ctypes.data + grid, w.offsets.ctypes.data + grid, num_groups, sums.ctypes.data,
                dots.ctypes.data,
            )  # fmt: skip
            for i in range(count):
                row, own = out[start + i, panel * PANEL : (panel + 1) * PANEL], sums[i]
                for c in range(PANEL):
                    row[c] = row[c] + own[c] if accumulate else own[c]


def level_of(w, panel, group, k, column):
    """The level number k of a group in one column of w."""
    raise NotImplementedError("called from compiled code only")


@overload(level_of)
def _level_of(w, panel, group, k, column):
    _, bits = _KIND[w.instance_class]
    if bits == 8:
        return lambda w, panel, group, k, column: w.levels[panel, group, k // 4, column, k % 4]

    def level(w, panel, group, k, column):
        pair = w.levels[panel, group, (k // 4) % 4, column, k % 4]
        return pair & np.uint8(15) if k < GROUP // 2 else pair >> np.uint8(4)

    return level
