"""Products in bfloat16 by vectors: weights are widened to float32 in registers, and each row has two chains of sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from app.kernels.machine.simd import BYTES_AHEAD, GROUP, address_at, cases
from app.kernels.machine.vectors import FLOAT, INT, WORD, fma, prefetch, spread

#: Columns of a panel; pairs of k in a block, bytes of one pair of all its columns, and of a block of weights and of x.
PANEL = 16
_PAIRS, _PAIR_BYTES, _BLOCK_BYTES, _ROW_BYTES = GROUP // 2, 4 * PANEL, 2 * GROUP * PANEL, 4 * GROUP


class _Operands(NamedTuple):
    """LLVM values; see `bf16_tile`."""

    rows: Any
    x: Any
    x_block: Any
    w: Any
    w_panel: Any
    part: Any
    num_blocks: Any
    out: Any
    out_row: Any
    accumulate: Any


@cache
def bf16_tile(lanes: int, most_rows: int, parts: int) -> Callable[..., None]:
    """An inlined function for tiles of 1 to `most_rows` rows x `parts` vectors of `lanes` columns.

    It takes `(rows, x, x_block, w, w_panel, part, num_blocks, out, out_row, accumulate)`. x: address of the first
    row's float32 [32] in the first block; rows lie side by side, blocks x_block bytes apart. w: address of the first
    panel, w_panel bytes before the next; part: the first vector, counted from there. out: address of the first row,
    out_row bytes before the next. accumulate (boolean): add to what `out` holds.
    """

    @intrinsic
    def tile(
        typingctx: Any, rows: Any, x: Any, x_block: Any, w: Any, w_panel: Any, part: Any, num_blocks: Any, out: Any,
        out_row: Any, accumulate: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 9), types.boolean)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            at = _Operands(*args)
            for count in cases(builder, at.rows, range(1, most_rows + 1)):
                _emit(builder, lanes, count, parts, at)
            return context.get_dummy_value()

        return signature, codegen

    return cast(Callable[..., None], tile)


def _emit(builder: Any, lanes: int, rows: int, parts: int, at: _Operands) -> None:
    vector = ir.VectorType(FLOAT, lanes)
    zero, per_panel = ir.Constant(vector, [0.0] * lanes), PANEL // lanes
    places = [(i, p) for i in range(rows) for p in range(parts)]
    totals, even, odd = ({place: cgutils.alloca_once(builder, vector) for place in places} for _ in range(3))
    panels = []
    for p in range(parts):
        number = builder.add(at.part, WORD(p))
        panel, half = builder.udiv(number, WORD(per_panel)), builder.urem(number, WORD(per_panel))
        first = builder.add(builder.mul(panel, at.w_panel), builder.mul(half, WORD(4 * lanes)))
        panels.append(builder.add(at.w, first))
    for place in places:
        builder.store(zero, totals[place])
    with cgutils.for_range(builder, at.num_blocks, intp=WORD) as blocks:
        x = builder.add(at.x, builder.mul(blocks.index, at.x_block))
        block = builder.mul(blocks.index, WORD(_BLOCK_BYTES))
        for place in places:
            builder.store(zero, even[place])
            builder.store(zero, odd[place])
        with cgutils.for_range(builder, WORD(_PAIRS), intp=WORD) as pairs:
            offset = builder.add(block, builder.mul(pairs.index, WORD(_PAIR_BYTES)))
            weights = [_widen(builder, builder.add(panel, offset), lanes) for panel in panels]
            for i in range(rows):
                row = address_at(builder, builder.add(x, WORD(i * _ROW_BYTES)), pairs.index, 3)
                for odd_k, sums in enumerate((even, odd)):
                    value = spread(builder, _load(builder, builder.add(row, WORD(4 * odd_k)), FLOAT), vector)
                    for p in range(parts):
                        total = fma(builder, value, weights[p][odd_k], builder.load(sums[i, p]))
                        builder.store(total, sums[i, p])
        for place in places:
            term = builder.fadd(builder.load(even[place]), builder.load(odd[place]))
            builder.store(builder.fadd(builder.load(totals[place]), term), totals[place])
    for i, p in places:
        column = builder.mul(builder.add(at.part, WORD(p)), WORD(4 * lanes))
        target = builder.add(builder.add(at.out, builder.mul(at.out_row, WORD(i))), column)
        pointer = builder.inttoptr(target, vector.as_pointer())
        total = builder.load(totals[i, p])
        with builder.if_else(at.accumulate) as (held, fresh):
            with held:
                builder.store(builder.fadd(builder.load(pointer, align=4), total), pointer, align=4)
            with fresh:
                builder.store(total, pointer, align=4)


def _widen(builder: Any, address: Any, lanes: int) -> list[Any]:
    """The even and the odd weight of each column's pair at `address`."""
    kind, vector = ir.VectorType(INT, lanes), ir.VectorType(FLOAT, lanes)
    prefetch(builder, builder.add(address, WORD(BYTES_AHEAD)))
    pairs = _load(builder, address, kind)
    even = builder.shl(pairs, ir.Constant(kind, [16] * lanes))
    odd = builder.and_(pairs, ir.Constant(kind, [0xFFFF0000] * lanes))
    return [builder.bitcast(part, vector) for part in (even, odd)]


def _load(builder: Any, at: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(at, kind.as_pointer()), align=4)
