"""Products of rows with the weights of their own group (an expert) on the CPU inside XLA programs.

In: rows sorted by group, where each group begins, and packed weights in float32 or in 8 bits. Out: every row times its
group's weights. Rows of no group are neither read nor written: what they hold is not defined.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from app.kernels.machine.compiled import compiled
from app.kernels.machine.team import leave, take
from app.kernels.matmul.cpu import NO_FETCH, PANEL, panels_per_piece
from app.kernels.matmul.quantised import Quantised, layer_panels, multiply_any_panels
from app.kernels.xla_call import Bytes4, Floats2, Floats4, Ints1, KernelCall, Number, reader, team_of


class _Operands(NamedTuple):
    first: Number
    x: Floats2
    starts: Ints1
    w: Floats4


class _QuantisedOperands(NamedTuple):
    first: Number
    x: Floats2
    starts: Ints1
    levels: Bytes4
    scales: Floats4
    offsets: Floats4


class _Results(NamedTuple):
    out: Floats2


_operands, _results = reader(_Operands), reader(_Results, after=_Operands)
_quantised_operands, _quantised_results = reader(_QuantisedOperands), reader(_Results, after=_QuantisedOperands)


#: Where the first phase leaves for the second, among its counters, panels of a piece and groups that have rows.
_SIZE, _NUM_BUSY = 9, 10


@compiled
def _multiply_busy(team, phase, x, starts, stack, at, out):
    """out[i] = stack[at + g] applied to x[i] for the rows i of each group g. Two phases: one thread counts the pieces,
    which are a few panels of one group; then all compute them.

    How many there are is told by the call's own record: whoever comes late may find in `starts`, which decides it, what
    XLA has put there since. So nobody reads `starts` who has not a piece, for which the call waits.
    """
    num_panels, done = out.shape[1] // PANEL, 0
    if take(team, phase) == 0:
        num_busy = len(_busy_groups(starts))
        team[phase, _SIZE] = min(panels_per_piece(2 * starts[-1] // max(num_busy, 1), num_panels), num_panels)
        team[phase, _NUM_BUSY] = num_busy
        done = 1
    leave(team, phase, 1, done)
    size = team[phase, _SIZE]
    count = -(-num_panels // size)
    num_pieces, done = team[phase, _NUM_BUSY] * count, 0
    phase += 1
    index = take(team, phase)
    if index < num_pieces:
        busy = _busy_groups(starts)
        while index < num_pieces:
            group, panel = busy[index // count], index % count * size
            low, high = starts[group], starts[group + 1]
            end = min(panel + size, num_panels)
            multiply_any_panels(
                x[low:high], layer_panels(stack, at + group), panel, end, out[low:high], False, NO_FETCH
            )
            done += 1
            index = take(team, phase)
    return leave(team, phase, num_pieces, done)


@compiled
def _busy_groups(starts):
    """Those that have rows, in their order."""
    busy = np.empty(starts.shape[0] - 1, np.int64)
    num_busy = 0
    for group in range(starts.shape[0] - 1):
        if starts[group + 1] > starts[group]:
            busy[num_busy] = group
            num_busy += 1
    return busy[:num_busy]


def _multiply(record: int) -> None:
    given, found = _operands(record), _results(record)
    _multiply_busy(team_of(record), 0, given.x, given.starts, given.w, given.first, found.out)


def _multiply_quantised(record: int) -> None:
    given, found = _quantised_operands(record), _quantised_results(record)
    w = Quantised(given.levels, given.scales, given.offsets)
    _multiply_busy(team_of(record), 0, given.x, given.starts, w, given.first, found.out)


_call = KernelCall("multiply_groups", _Operands, _Results, _multiply, {})
_quantised_call = KernelCall("multiply_groups_quantised", _QuantisedOperands, _Results, _multiply_quantised, {})


def multiply_groups(x: Array, w: Array | Quantised, first: Array, starts: Array) -> Array:
    """x [P, K], its rows starts[g] to starts[g + 1] times the weights first + g -> [P, N].

    w: of all groups [M, N / 16, K, 16], or the same in 8 bits. first: int32. starts: [G + 1] int32, ascending.
    """
    shapes = ((len(x), PANEL * (w.levels if isinstance(w, Quantised) else w).shape[1]),)
    if isinstance(w, Quantised):
        out: Array = _quantised_call(_QuantisedOperands(first, x, starts, *map(jnp.asarray, w)), shapes).out
    else:
        out = _call(_Operands(first, x, starts, w), shapes).out
    return out
