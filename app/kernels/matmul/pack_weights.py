"""Packs a checkpoint's float32 weights [N, K] into a stack: float32 panels, or 8-bit `Int8Panels`.

A group of 32 weights that lies on a grid of at most 255 equal steps is stored on that grid, so that the product reads
back every weight to the bit: checkpoints that were quantised in groups of 32 (GGUF Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, mostly
Q4_K and Q5_K) lose nothing, as long as float32 holds a group's offset and steps without rounding (an offset of 2**-9
steps and less takes more bits). Other groups are rounded to 255 steps from their smallest to their largest weight, or
rejected, as the caller chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.simd import GROUP
from app.kernels.machine.thread_team import ThreadTeam, claim_piece, finish_phase
from app.kernels.matmul.cpu import PANEL, pack_into
from app.kernels.matmul.int8 import Int8Panels, expand_panel

#: A stack as it is filled; `app.kernels.int8_matmul.pack_dot` converts it for products in integers.
FilledStack = NDArray[np.float32] | Int8Panels

#: Steps of the finest grid that a byte can count.
MAX_STEPS = 255


def empty_stack(num_layers: int, num_columns: int, depth: int, *, quantised: bool) -> FilledStack:
    """Allocate `num_layers` weights [num_columns, depth]; the contents are arbitrary before `store`."""
    shape = (num_layers, -(-num_columns // PANEL))
    if not quantised:
        return np.empty((*shape, depth, PANEL), np.float32)
    groups = (*shape, -(-depth // GROUP), PANEL)
    return Int8Panels(
        np.empty((*shape, depth, PANEL), np.uint8), np.empty(groups, np.float32), np.empty(groups, np.float32)
    )


def store(
    team: ThreadTeam,
    stack: FilledStack,
    layer: int,
    first_column: int,
    w: NDArray[np.float32],
    *,
    only_exact: bool = False,
) -> bool:
    """Pack w [N, K] into columns first_column (a multiple of 16) and up of one layer; returns whether that was exact.

    `only_exact`: stop, leaving those columns arbitrary, at the first weight that 8 bits would change.
    """
    first = first_column // PANEL
    columns = slice(first, first - (-w.shape[0] // PANEL))
    if not isinstance(stack, Int8Panels):
        team.run(pack_panels, 1, w, stack[layer, columns])
        return True
    changed = np.zeros(1, np.uint8)
    part = Int8Panels._make(array[layer, columns] for array in stack)
    team.run(quantise_panels, 1, w, part, only_exact, changed)
    return not changed[0]


def dequantise_stack(
    team: ThreadTeam, stack: Int8Panels, stored: Sequence[tuple[int, int, int]]
) -> NDArray[np.float32]:
    """The stack in float32, to the bit; `stored` lists the (layer, first column, end column) to copy."""
    wide = np.empty(stack.levels.shape, np.float32)
    for layer, first_column, end_column in stored:
        panels = slice(first_column // PANEL, -(-end_column // PANEL))
        team.run(expand_panels, 1, Int8Panels._make(part[layer, panels] for part in stack), wide[layer, panels])
    return wide


def quantise(w: NDArray[np.float32]) -> Int8Panels:
    """[N, K] -> 8-bit panels."""
    stack = empty_stack(1, *w.shape, quantised=True)
    store(ThreadTeam(1), stack, 0, 0, w)
    return Int8Panels._make(part[0] for part in stack)


def dequantise(w: Int8Panels) -> NDArray[np.float32]:
    """The float32 panels [P, K, 16] that a product with `w` uses, to the bit."""
    out = np.empty(w.levels.shape, np.float32)
    ThreadTeam(1).run(expand_panels, 1, w, out)
    return out


@jit
def pack_panels(team, phase, w, panels):
    """`pack_into`, one panel at a time. One phase."""
    done = 0
    p = claim_piece(team, phase)
    while p < panels.shape[0]:
        pack_into(w[p * PANEL : (p + 1) * PANEL], panels[p : p + 1])
        done += 1
        p = claim_piece(team, phase)
    return finish_phase(team, phase, panels.shape[0], done)


@jit
def expand_panels(team, phase, w, out):
    """`expand_panel` of each panel of w, `Int8Panels`, into out [P, K, 16]. One phase."""
    done = 0
    p = claim_piece(team, phase)
    while p < out.shape[0]:
        expand_panel(w.levels[p], w.scales[p], w.offsets[p], out[p])
        done += 1
        p = claim_piece(team, phase)
    return finish_phase(team, phase, out.shape[0], done)


@jit
def quantise_panels(team, phase, w, out, only_exact, changed):
    """w [N, K] -> `Int8Panels` panels in place; changed[0] = 1 if any weight reads back changed. One phase."""
    num_panels, done = out.levels.shape[0], 0
    expanded = np.empty((w.shape[1], PANEL), np.float32)
    p = claim_piece(team, phase)
    while p < num_panels:
        if not (only_exact and changed[0]):
            levels, scales, offsets = out.levels[p], out.scales[p], out.offsets[p]
            levels[:], scales[:], offsets[:] = 0, 0, 0  # columns past N
            columns = w[p * PANEL : (p + 1) * PANEL]
            for c in range(columns.shape[0]):
                for group in range(scales.shape[0]):
                    _quantise_group(columns[c], group, True, levels[:, c], scales[:, c], offsets[:, c])
            expand_panel(levels, scales, offsets, expanded)
            for c in range(columns.shape[0]):
                for group in range(scales.shape[0]):
                    if _num_changed(columns[c], group, expanded[:, c]):
                        changed[0] = 1
                        _quantise_group(columns[c], group, False, levels[:, c], scales[:, c], offsets[:, c])
        done += 1
        p = claim_piece(team, phase)
    return finish_phase(team, phase, num_panels, done)


@jit
def _quantise_group(column, group, on_grid, levels, scales, offsets):
    """Quantise one group of a column [K] in place: on the grid that it seems to lie on, or over the finest one."""
    first, end = group * GROUP, min((group + 1) * GROUP, column.shape[0])
    low = high = column[first]
    for k in range(first + 1, end):
        low, high = min(low, column[k]), max(high, column[k])
    num_steps = _num_steps(column[first:end], low, high) if on_grid else np.float64(MAX_STEPS)
    scale = np.float32((np.float64(high) - low) / num_steps)
    scales[group], offsets[group] = scale, low
    levels_per_unit = 1.0 / scale if scale > 0 else 0.0
    for k in range(first, end):
        level = np.rint((np.float64(column[k]) - low) * levels_per_unit)
        levels[k] = np.uint8(min(max(level, 0.0), np.float64(MAX_STEPS)))


@jit
def _num_changed(column, group, expanded):
    count = 0
    for k in range(group * GROUP, min((group + 1) * GROUP, column.shape[0])):
        count += column[k] != expanded[k]
    return count


@jit
def _num_steps(weights, low, high):
    """Steps from low to high of the coarsest grid that the weights seem to lie on; 255 if there is none.

    The step is the greatest common divisor of the distances from `low`, by Euclid's algorithm; a remainder below
    half the finest step counts as rounding, so the answer is a guess to be checked.
    """
    span = np.float64(high) - low
    num_steps = 1.0
    if not span > 0:
        return num_steps
    noise = span / (2 * (MAX_STEPS + 1))
    step, steps_per_unit = span, 1.0 / span
    for weight in weights:
        distance = np.float64(weight) - low
        rest = abs(distance - np.rint(distance * steps_per_unit) * step)
        if rest > noise:
            while rest > noise:
                step, rest = rest, abs(step - np.rint(step / rest) * rest)
            num_steps = np.rint(span / step)
            if num_steps > MAX_STEPS:
                return np.float64(MAX_STEPS)
            step, steps_per_unit = span / num_steps, num_steps / span
    return num_steps
