"""Copying adapters into the CPU's rank rows: a whole adapter in one compiled call, module by module on any thread.

In: addresses of matrices and of their places in the tables (`sgmv._cpu` says how those are laid out). Out: the
tables' rows. b is copied in runs of sixteen columns; a is turned from rows to panels of eight in blocks that stay in
registers. It costs the memory's bandwidth: 19.5 MB for rank 16 on every module of a 135M model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from app.kernels.compiled import compiled
from app.kernels.matmul._cpu import PANEL
from app.kernels.team import leave, take
from app.kernels.vectors import LANES

#: Panels of b that are filled together.
_PANELS_AT_ONCE = 4
#: Columns of a module's line in a plan: addresses and sizes, int64.
A, B, RANK, D_IN, D_OUT, TO_A, TO_B, TABLE_ROWS = range(8)
PLAN_WIDTH = 8


@intrinsic
def _turn_block(typingctx: Any, source: Any, stride: Any, to: Any) -> Any:
    """to[k * 8 + lane] = source[lane * stride + k] for k and lane below 8; addresses, stride in bytes."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, stride, to = args
        word, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
        rows = []
        for lane in range(LANES):
            at = builder.add(source, builder.mul(stride, word(lane)))
            rows.append(builder.load(builder.inttoptr(at, vector.as_pointer()), align=4))

        def mixed(one: Any, other: Any, order: list[int]) -> Any:
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), order)
            return builder.shuffle_vector(one, other, mask)

        # Three rounds of interleaving: rows r and r + 4, each time, give rows 2 r and 2 r + 1.
        low = [0, 8, 1, 9, 2, 10, 3, 11]
        for _ in range(3):
            pairs = [(rows[r], rows[r + 4]) for r in range(4)]
            rows = [mixed(*pair, [i + half for i in low]) for pair in pairs for half in (0, 4)]
        for k, row in enumerate(rows):
            builder.store(row, builder.inttoptr(builder.add(to, word(k * 4 * LANES)), vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*([types.intp] * 3)), codegen


@intrinsic
def _copy_panel(typingctx: Any, source: Any, to: Any) -> Any:
    """to[i] = source[i] for i below 16; addresses."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
        for part in range(PANEL // LANES):
            source, to = (builder.add(address, word(part * 4 * LANES)) for address in args)
            value = builder.load(builder.inttoptr(source, vector.as_pointer()), align=4)
            builder.store(value, builder.inttoptr(to, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def _copy_one(typingctx: Any, source: Any, to: Any) -> Any:
    """One float32."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, to = (builder.inttoptr(address, ir.FloatType().as_pointer()) for address in args)
        builder.store(builder.load(source), to)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def _zero_one(typingctx: Any, to: Any) -> Any:
    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(ir.Constant(ir.FloatType(), 0.0), builder.inttoptr(args[0], ir.FloatType().as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@compiled
def write_module(a, b, rank, d_in, d_out, to_a, to_b, table_rows):
    """a [r, d_in] to panels of eight rows at `to_a`, zero-filled; b [r, d_out] to panels of 16 columns at `to_b`."""
    row = d_in * 4
    first = 0
    while first < rank:
        count = min(LANES, rank - first)
        source, to = a + first * row, to_a + first * row
        k = 0
        if count == LANES:
            while k + LANES <= d_in:
                _turn_block(source + k * 4, row, to + k * LANES * 4)
                k += LANES
        while k < d_in:
            for lane in range(count):
                _copy_one(source + lane * row + k * 4, to + (k * LANES + lane) * 4)
            for lane in range(count, LANES):
                _zero_one(to + (k * LANES + lane) * 4)
            k += 1
        first += LANES
    num_whole = d_out // PANEL
    panel = 0
    while panel < num_whole:  # a few at a time: longer runs to read, few places to write
        end = min(panel + _PANELS_AT_ONCE, num_whole)
        for i in range(rank):
            for p in range(panel, end):
                _copy_panel(b + (i * d_out + p * PANEL) * 4, to_b + (p * table_rows + i) * PANEL * 4)
        panel = end
    for i in range(rank):
        for column in range(num_whole * PANEL, d_out):
            to = to_b + (num_whole * table_rows + i) * PANEL * 4
            _copy_one(b + (i * d_out + column) * 4, to + (column - num_whole * PANEL) * 4)


@compiled
def write_plan(team, phase, plan):
    """Every module of a plan [M, 8] int64, see `WritePlans`. One phase."""
    done = 0
    index = take(team, phase)
    while index < plan.shape[0]:
        m = plan[index]
        write_module(m[A], m[B], m[RANK], m[D_IN], m[D_OUT], m[TO_A], m[TO_B], m[TABLE_ROWS])
        done += 1
        index = take(team, phase)
    return leave(team, phase, plan.shape[0], done)


class WritePlans:
    """Plans for one set of tables: what never changes is worked out once."""

    def __init__(self, a_tables: Sequence[NDArray[np.float32]], b_tables: Sequence[NDArray[np.float32]]) -> None:
        """Per module: a_tables [L, R / 8, d_in, 8] and b_tables [L, P, R, 16]. They must not move or be freed."""
        num_layers, num_modules = len(a_tables[0]), len(a_tables)
        self._template: NDArray[np.int64] = np.zeros((num_layers, num_modules, PLAN_WIDTH), np.int64)
        for n, (a, b) in enumerate(zip(a_tables, b_tables, strict=True)):
            lines = self._template[:, n]
            lines[:, D_IN], lines[:, TABLE_ROWS] = a.shape[2], b.shape[2]
            for column, table in ((TO_A, a), (TO_B, b)):
                lines[:, column] = address(table) + table.strides[0] * np.arange(num_layers)

    def plan(
        self,
        modules: Sequence[tuple[int, int, NDArray[np.float32], NDArray[np.float32]]],
        row_start: int,
    ) -> NDArray[np.int64]:
        """For (layer, module, a [r, d_in], b [r, d_out]), to be written from `row_start`, a multiple of 8.

        The arrays must be contiguous and live, unmoved, until the plan has been carried out.
        """
        places = [(layer, n) for layer, n, _, _ in modules]
        plan = self._template[tuple(np.array(places, np.int64).reshape(-1, 2).T)]
        facts = [(address(a), address(b), len(a), b.shape[1]) for _, _, a, b in modules]
        plan[:, [A, B, RANK, D_OUT]] = np.array(facts, np.int64).reshape(-1, 4)
        plan[:, TO_A] += row_start * 4 * plan[:, D_IN]
        plan[:, TO_B] += row_start * 4 * PANEL
        return plan


def address(array: NDArray[np.float32]) -> int:
    where: int = array.__array_interface__["data"][0]  # a third of the time of array.ctypes.data
    return where
