"""Matrix products in bfloat16 on the CPU: rows are rounded, then multiplied by weights that are stored rounded.

Batch-invariant: a row's rounding depends on the row alone, and its sums have one order (see `reference`). Weights have
one layout; the form that multiplies them is a part of their type, so that a decoder is compiled for the one that the
self-test has chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from app.kernels.bf16_matmul.amx import multiply_amx_panels
from app.kernels.bf16_matmul.rounding import RoundedRows, aligned_empty, new_rows
from app.kernels.bf16_matmul.tiles import PANEL, bf16_tile
from app.kernels.machine.jit import jit
from app.kernels.machine.row_groups import round_group
from app.kernels.machine.simd import GROUP
from app.kernels.machine.thread_team import ThreadTeam, claim_piece, finish_phase

#: Bytes of a row's values in one block, in float32.
_ROW_BYTES = 4 * GROUP


class Bf16Panels(NamedTuple):
    """Weights for products in bfloat16. Subclasses say which form multiplies them.

    pairs: [..., P, B, 16, 16, 2] uint16, bfloat16 bits: blocks of 32 k, in each pairs of consecutive k by column. Zero
    past the depth. rows: memory for the other factor, shared by all weights; none while the weights are filled.
    """

    pairs: NDArray[np.uint16]
    rows: RoundedRows


class AmxPanels(Bf16Panels):
    """For AMX with bfloat16."""


class Avx512Panels(Bf16Panels):
    """For AVX-512."""


class PortablePanels(Bf16Panels):
    """For every processor: with AVX2, LLVM makes it that."""


#: Form -> type of the weights. AVX-512 has an instruction for products in bfloat16, VDPBF16PS, which adds both terms
#: of a pair to one sum, in another order: it cannot give the reference's bits.
PANELS_OF: dict[str, type[Bf16Panels]] = {"amx": AmxPanels, "avx512": Avx512Panels, "portable": PortablePanels}


def is_bf16(w: Any) -> bool:
    """Whether a Numba type of weights is for products in bfloat16."""
    return isinstance(w, types.BaseNamedTuple) and issubclass(w.instance_class, Bf16Panels)


def empty_panels(num_layers: int, num_columns: int, depth: int) -> Bf16Panels:
    """Allocate `num_layers` weights [num_columns, depth]; the contents are arbitrary before `pack`."""
    shape = (num_layers, -(-num_columns // PANEL), -(-depth // GROUP), GROUP // 2, PANEL, 2)
    return Bf16Panels(aligned_empty(shape, np.uint16), new_rows(0, np.uint16))


def pack(team: ThreadTeam, w: NDArray[np.float32], panels: Bf16Panels, layer: int, first_column: int) -> None:
    """Round w [N, K] into columns first_column (a multiple of 16) and up of one layer."""
    first = first_column // PANEL
    pairs = panels.pairs[layer, first : first - (-len(w) // PANEL)]
    team.run(pack_pairs, 1, w, pairs, new_rows(len(pairs) * GROUP, np.uint16))


def for_form(panels: Bf16Panels, form: str, rows: RoundedRows) -> Bf16Panels:
    """Weights for one form, with rows of `rows_for`."""
    return PANELS_OF[form](panels.pairs, rows)


def rows_for(form: str, num_values: int) -> RoundedRows:
    """Memory for `num_values` values, a multiple of 32, of rows of x."""
    return new_rows(num_values, np.uint16 if form == "amx" else np.float32)


def float32_panels(pairs: NDArray[np.uint16], depth: int) -> NDArray[np.float32]:
    """The weights of pairs [..., P, B, 16, 16, 2] as float32 panels [..., P, K, 16]."""
    panels = (pairs.astype(np.uint32) << 16).view(np.float32).swapaxes(-1, -2)
    return np.ascontiguousarray(panels.reshape(*pairs.shape[:-4], -1, PANEL)[..., :depth, :])


@jit
def bf16_panels_per_piece(num_panels):
    """Panels that one thread takes at a time: whole groups of tiles, some 10 microseconds if they come from memory."""
    return -(-max(num_panels // 256, 4) // 4) * 4


@jit
def pack_pairs(team, phase, w, pairs, scratch):
    """w [N, K] float32 -> pairs [P, B, 16, 16, 2] in place; columns past N become zero. One phase.

    scratch: `RoundedRows` of `pairs.shape[0]` groups in uint16, one for each panel.
    """
    done, (num_columns, depth) = 0, w.shape
    values = np.empty(GROUP, np.float32)
    p = claim_piece(team, phase)
    while p < pairs.shape[0]:
        for block in range(pairs.shape[1]):
            for c in range(PANEL):
                column = p * PANEL + c
                for i in range(GROUP):
                    k = block * GROUP + i
                    values[i] = w[column, k] if column < num_columns and k < depth else np.float32(0.0)
                round_group(scratch, values.ctypes.data, p)
                for i in range(GROUP // 2):
                    pairs[p, block, i, c, 0] = scratch.values[p * GROUP + 2 * i]
                    pairs[p, block, i, c, 1] = scratch.values[p * GROUP + 2 * i + 1]
        done += 1
        p = claim_piece(team, phase)
    return finish_phase(team, phase, pairs.shape[0], done)


def _vector_form(lanes: int, most_rows: int) -> Any:
    """The product by vectors of `lanes` columns. One to three rows take several vectors at once: a core can start
    eight multiply-adds before the first is done."""
    four_parts, two_parts = bf16_tile(lanes, 1, 4), bf16_tile(lanes, 3, 2)
    one_part, per_panel = bf16_tile(lanes, most_rows, 1), PANEL // lanes

    @jit
    def multiply(values, first_row, total_rows, w, first, end, out, accumulate):
        num_rows, num_blocks = out.shape[0], w.shape[1]
        x, x_block = values.ctypes.data + first_row * _ROW_BYTES, total_rows * _ROW_BYTES
        at, w_panel, to, out_row = w.ctypes.data, w.strides[0], out.ctypes.data, out.strides[0]
        part, last = first * per_panel, end * per_panel
        if num_rows == 1:
            while part + 4 <= last:
                four_parts(1, x, x_block, at, w_panel, part, num_blocks, to, out_row, accumulate)
                part += 4
        if 1 <= num_rows <= 3:
            while part + 2 <= last:
                two_parts(num_rows, x, x_block, at, w_panel, part, num_blocks, to, out_row, accumulate)
                part += 2
        while part < last:
            for i in range(0, num_rows, most_rows):
                rows = min(most_rows, num_rows - i)
                row, own = x + i * _ROW_BYTES, to + i * out_row
                one_part(rows, row, x_block, at, w_panel, part, num_blocks, own, out_row, accumulate)
            part += 1

    return multiply


_by_avx512, _portable = _vector_form(16, 8), _vector_form(8, 4)


def multiply_bf16_panels(w, first_row, total_rows, first, end, out, accumulate):
    """out[:, 16 * first : 16 * end] (+)= some rounded rows @ panels first to end of w, of one layer.

    w.rows holds a product with total_rows rows; out: [T, >= 16 * end] float32, of the T rows from first_row on. One
    thread.
    """
    raise NotImplementedError("called from compiled code only")


@overload(multiply_bf16_panels)
def _multiply_bf16_panels(w, first_row, total_rows, first, end, out, accumulate):
    forms = {AmxPanels: multiply_amx_panels, Avx512Panels: _by_avx512, PortablePanels: _portable}
    multiply = forms[w.instance_class]
    return lambda w, first_row, total_rows, first, end, out, accumulate: multiply(
        w.rows.values, first_row, total_rows, w.pairs, first, end, out, accumulate
    )
