"""LoRA deltas on the CPU inside XLA programs.

In: rows, the product they gave, rank rows of all layers and the step's segments. Out: the product, in its own memory,
with the deltas added to the segments' rows; no other row is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import Array

from app.kernels.machine.compiled import compiled
from app.kernels.matmul.cpu import PANEL
from app.kernels.sgmv.cpu import ModuleRows, expand, shrink
from app.kernels.sgmv.xla import Segments
from app.kernels.xla_call import Floats2, Floats3, Ints1, Ints2, Ints3, KernelCall, Number, reader, team_of

#: Modules of the largest product.
_MODULES = 3


class _Operands(NamedTuple):
    layer: Number
    num_segments: Number
    widest: Number
    x: Floats2
    y: Floats2
    starts: Ints1
    ranks: Ints3
    segments: Ints2
    first_a: Floats3
    second_a: Floats3
    third_a: Floats3
    first_b: Floats3
    second_b: Floats3
    third_b: Floats3


class _Results(NamedTuple):
    y: Floats2
    shrunk: Floats3


_operands, _results = reader(_Operands), reader(_Results, after=_Operands)


def _add_deltas(record: int) -> None:
    given, found, team = _operands(record), _results(record), team_of(record)
    layer, ranks = given.layer, given.ranks[given.layer]
    segments = given.segments[: given.num_segments]
    tables_a = given.first_a[layer], given.second_a[layer], given.third_a[layer]
    tables_b = given.first_b[layer], given.second_b[layer], given.third_b[layer]
    a, _ = _addresses(tables_a, ranks, segments, given.starts)
    b, num_panels = _addresses(tables_b, ranks, segments, given.starts)
    rows = ModuleRows(a, b, ranks, num_panels, np.zeros(len(given.starts), np.bool_))
    shrink(team, 0, given.x, rows, segments, given.widest, found.shrunk)
    expand(team, 1, found.shrunk, rows, segments, found.y)


@compiled
def _addresses(tables, ranks, segments, starts):
    """[S, N] addresses of the segments' adapters in tables [R, W] of the N modules; panels of 16 columns of each.

    A helper that comes late (`Team.run`) may find in the segments what XLA has put there since: it finds no work, but
    comes through here first. So a slot is believed only where there is one.
    """
    addresses, num_panels = np.zeros(ranks.shape, np.int64), np.zeros(ranks.shape[1], np.int64)
    for n in range(len(tables)):
        if n < ranks.shape[1]:
            width = tables[n].shape[1]
            num_panels[n] = width // PANEL
            for j in range(segments.shape[0]):
                adapter_slot = segments[j, 2]
                if 0 <= adapter_slot < len(addresses):
                    addresses[adapter_slot, n] = tables[n].ctypes.data + np.int64(starts[adapter_slot]) * width * 4
    return addresses, num_panels


_call = KernelCall("add_deltas", _Operands, _Results, _add_deltas, {"y": "y"})


def add_deltas(
    x: Array, y: Array, a: Sequence[Array], b: Sequence[Array], layer: Array, segments: Segments, starts: Array,
    ranks: Array, max_rank: int,
) -> Array:  # fmt: skip
    """y [T, sum of W] with the deltas of x [T, d_in] added, for up to three modules side by side in y.

    a: per module [L, R, d_in], b: per module [L, R, W], an adapter's rows packed as `app.kernels.sgmv.cpu` says.
    starts: [S], an adapter's first rank row. ranks: [L, S, modules]. All integers are int32. max_rank: the largest that
    an adapter may have, a multiple of eight.
    """
    if not a[0].shape[1]:
        return y  # no rank rows: adapters are switched off
    assert len(a) == len(b) == ranks.shape[2] <= _MODULES
    first_a, second_a, third_a = (a[min(n, len(a) - 1)] for n in range(_MODULES))
    first_b, second_b, third_b = (b[min(n, len(b) - 1)] for n in range(_MODULES))
    operands = _Operands(
        layer, segments.num_segments, segments.widest, x, y, starts, ranks, segments.lines, first_a, second_a, third_a,
        first_b, second_b, third_b,
    )  # fmt: skip
    out: Array = _call(operands, (y.shape, (len(x), len(a), max_rank))).y
    return out
