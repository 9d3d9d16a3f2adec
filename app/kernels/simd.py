"""A register-tiled multiply-accumulate as a Numba intrinsic: the one place that emits vector code.

In: addresses and strides. Out: a tile of `out += x @ w` kept in vector registers over the whole sum.
One rule: every element of the result is one chain of fused multiply-adds over k = 0, 1, 2, ... in
that order, whatever the tile's shape. So a row's bits never depend on how many rows are computed
with it, which tile it falls into or which thread computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: float32 lanes of one vector; LLVM splits wider vectors than the machine has.
LANES = 8


@cache
def multiply_tile(rows: int, panels: int, vectors: int) -> Callable[..., None]:
    """A compiled-in function for a tile of `rows` x (`panels` * `vectors` * LANES) float32.

    The function takes addresses (integers) and strides counted in elements:
    `(x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, accumulate)`.
    x[i, kk] is at x + i * x_row + kk; w's vector for panel p at w + p * w_panel + kk * w_k; the result
    row i of panel p at out + i * out_row + p * out_panel. `accumulate` (boolean): start from what
    `out` holds, else from zero. Nothing is read or written outside the tile.
    """

    @intrinsic
    def tile(
        typingctx: Any, x: Any, x_row: Any, w: Any, w_k: Any, w_panel: Any, k: Any, out: Any, out_row: Any,
        out_panel: Any, accumulate: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 9), types.boolean)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _emit_tile(builder, rows, panels, vectors, args)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def _emit_tile(builder: Any, rows: int, panels: int, vectors: int, args: Any) -> None:
    x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, accumulate = args
    word, lane = ir.IntType(64), ir.FloatType()
    vector = ir.VectorType(lane, LANES)
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")

    def address(base: Any, *offsets: Any) -> Any:
        total = base
        for offset in offsets:
            total = builder.add(total, builder.shl(offset, word(2)))
        return total

    def load(at: Any, kind: Any) -> Any:
        return builder.load(builder.inttoptr(at, kind.as_pointer()), align=4)

    columns = [(p, v) for p in range(panels) for v in range(vectors)]
    targets = {
        (i, p, v): address(out, builder.mul(out_row, word(i)), builder.mul(out_panel, word(p)), word(v * LANES))
        for i in range(rows)
        for p, v in columns
    }
    zero = ir.Constant(vector, [0.0] * LANES)
    sums = {key: cgutils.alloca_once_value(builder, zero) for key in targets}
    with builder.if_then(accumulate):
        for key, at in targets.items():
            builder.store(load(at, vector), sums[key])
    x_rows = [address(x, builder.mul(x_row, word(i))) for i in range(rows)]
    w_panels = [address(w, builder.mul(w_panel, word(p))) for p in range(panels)]
    with cgutils.for_range(builder, k, intp=word) as loop:
        step = builder.mul(w_k, loop.index)
        weights = {(p, v): load(address(w_panels[p], step, word(v * LANES)), vector) for p, v in columns}
        for i in range(rows):
            value = load(address(x_rows[i], loop.index), lane)
            spread = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
            spread = builder.shuffle_vector(
                spread,
                ir.Constant(vector, ir.Undefined),
                ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES),
            )
            for p, v in columns:
                total = builder.load(sums[i, p, v])
                builder.store(builder.call(fma, [spread, weights[p, v], total]), sums[i, p, v])
    for key, at in targets.items():
        builder.store(builder.load(sums[key]), builder.inttoptr(at, vector.as_pointer()), align=4)
