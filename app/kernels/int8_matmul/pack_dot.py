"""Converts 8-bit weights to the layout of the products in integers, and back."""

from __future__ import annotations

import numpy as np

from app.kernels.int8_matmul.cpu import PANELS_OF, DotPanels
from app.kernels.int8_matmul.quantise import QuantisedRows
from app.kernels.int8_matmul.tiles import PANEL, QUAD
from app.kernels.machine.simd import GROUP
from app.kernels.matmul.int8 import Int8Panels

#: The largest level of four bits.
_MAX_SMALL = 15


def pack_dot(w: Int8Panels, form: str, rows: QuantisedRows) -> DotPanels:
    """The same weights for products in integers, with 4 bits a level where all levels have room in them.

    w: levels [L, P, K, 16]. One layer at a time is copied twice.
    """
    (num_layers, num_panels, depth), num_groups = w.levels.shape[:3], w.scales.shape[2]
    bits = 4 if w.levels.max(initial=0) <= _MAX_SMALL else 8
    num_quads = GROUP // QUAD
    stored = num_quads * bits // 8
    levels = np.empty((num_layers, num_panels, num_groups, stored, PANEL, QUAD), np.uint8)
    for layer in range(num_layers):
        padded = np.zeros((num_panels, num_groups * GROUP, PANEL), np.uint8)
        padded[:, :depth] = w.levels[layer]
        quads = padded.reshape(num_panels, num_groups, num_quads, QUAD, PANEL).swapaxes(3, 4)
        levels[layer] = quads if bits == 8 else quads[:, :, :stored] | quads[:, :, stored:] << 4
    return PANELS_OF[form][bits](levels, w.scales, w.offsets, rows)


def unpack_dot(w: DotPanels, depth: int) -> Int8Panels:
    """The weights that `pack_dot` was given, of any number of leading axes."""
    quads = w.levels
    if quads.shape[-3] * QUAD < GROUP:
        quads = np.concatenate([quads & 15, quads >> 4], axis=-3)
    levels = quads.swapaxes(-1, -2)
    levels = levels.reshape(*levels.shape[:-4], -1, PANEL)[..., :depth, :]
    return Int8Panels(np.ascontiguousarray(levels), w.scales, w.offsets)
