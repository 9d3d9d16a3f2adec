"""A register-tiled multiply-accumulate as a Numba intrinsic.

In: addresses and strides. Out: a tile of `out += x @ w` kept in vector registers over the whole sum.
One rule: the terms of every element are added in one order, whatever the tile's shape: chains of fused
multiply-adds over `CHUNK` consecutive k, each from zero, their sums added up in the order of k. So
a row's bits never depend on how many rows are computed with it, which tile it falls into or which thread
computes it. (Chunks because one long chain loses accuracy: 2e-4 instead of 6e-5 in a 135M model's logits.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from app.kernels.vectors import LANES, load_bf16, spread

#: Terms of one chain. A multiple of the group of `app.kernels.matmul._quantised`.
CHUNK = 128


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
            _emit_tile(builder, rows, panels, vectors, args, in_bf16=False)
            return context.get_dummy_value()

        return signature, codegen

    return tile


@cache
def multiply_either_tile(rows: int, panels: int, vectors: int) -> Callable[..., None]:
    """As `multiply_tile`, with a last argument `in_bf16` (boolean): w holds bfloat16 values, two bytes each.

    They are widened in registers, which is exact, and added in the same order: the same bits as from float32.
    """

    @intrinsic
    def tile(
        typingctx: Any, x: Any, x_row: Any, w: Any, w_k: Any, w_panel: Any, k: Any, out: Any, out_row: Any,
        out_panel: Any, accumulate: Any, in_bf16: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 9), types.boolean, types.boolean)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            *rest, in_bf16 = args
            with builder.if_else(in_bf16) as (narrow, wide):
                with narrow:
                    _emit_tile(builder, rows, panels, vectors, rest, in_bf16=True)
                with wide:
                    _emit_tile(builder, rows, panels, vectors, rest, in_bf16=False)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def _emit_tile(builder: Any, rows: int, panels: int, vectors: int, args: Any, *, in_bf16: bool) -> None:
    x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, accumulate = args
    word, lane = ir.IntType(64), ir.FloatType()
    vector = ir.VectorType(lane, LANES)
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")

    def address(base: Any, *offsets: Any, size_bits: int = 2) -> Any:
        total = base
        for offset in offsets:
            total = builder.add(total, builder.shl(offset, word(size_bits)))
        return total

    def load(at: Any, kind: Any) -> Any:
        return builder.load(builder.inttoptr(at, kind.as_pointer()), align=4)

    def load_weights(base: Any, *offsets: Any) -> Any:
        if in_bf16:
            return load_bf16(builder, address(base, *offsets, size_bits=1))
        return load(address(base, *offsets), vector)

    columns = [(p, v) for p in range(panels) for v in range(vectors)]
    targets = {
        (i, p, v): address(out, builder.mul(out_row, word(i)), builder.mul(out_panel, word(p)), word(v * LANES))
        for i in range(rows)
        for p, v in columns
    }
    zero = ir.Constant(vector, [0.0] * LANES)
    sums = {key: cgutils.alloca_once(builder, vector) for key in targets}
    x_rows = [address(x, builder.mul(x_row, word(i))) for i in range(rows)]
    w_panels = [builder.mul(w_panel, word(p)) for p in range(panels)]
    num_chunks = builder.lshr(builder.add(k, word(CHUNK - 1)), word(CHUNK.bit_length() - 1))
    # With nothing to sum, the result must still be written.
    num_chunks = builder.select(builder.icmp_signed("==", num_chunks, word(0)), word(1), num_chunks)
    with cgutils.for_range(builder, num_chunks, intp=word) as chunk:
        for total in sums.values():
            builder.store(zero, total)
        first = builder.mul(chunk.index, word(CHUNK))
        left = builder.sub(k, first)
        count = builder.select(builder.icmp_signed("<", left, word(CHUNK)), left, word(CHUNK))
        with cgutils.for_range(builder, count, intp=word) as loop:
            at_k = builder.add(first, loop.index)
            step = builder.mul(w_k, at_k)
            weights = {(p, v): load_weights(w, w_panels[p], step, word(v * LANES)) for p, v in columns}
            for i in range(rows):
                value = spread(builder, load(address(x_rows[i], at_k), lane))
                for p, v in columns:
                    total = builder.load(sums[i, p, v])
                    builder.store(builder.call(fma, [value, weights[p, v], total]), sums[i, p, v])
        held = builder.or_(accumulate, builder.icmp_signed(">", chunk.index, word(0)))
        with builder.if_else(held) as (adds, starts):
            with adds:
                for key, at in targets.items():
                    _store(builder, builder.fadd(load(at, vector), builder.load(sums[key])), at)
            with starts:
                for key, at in targets.items():
                    _store(builder, builder.load(sums[key]), at)


@intrinsic
def expand_bf16(typingctx: Any, values: Any, count: Any, out: Any) -> Any:
    """out[i] = values[i], i < count, a multiple of LANES; addresses of bfloat16 and float32."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        values, count, out = args
        word = ir.IntType(64)
        with cgutils.for_range(builder, builder.lshr(count, word(3)), intp=word) as loop:
            wide = load_bf16(builder, builder.add(values, builder.shl(loop.index, word(4))))
            _store(builder, wide, builder.add(out, builder.shl(loop.index, word(5))))
        return context.get_dummy_value()

    return types.void(*([types.intp] * 3)), codegen


def _store(builder: Any, value: Any, at: Any) -> None:
    builder.store(value, builder.inttoptr(at, value.type.as_pointer()), align=4)


@intrinsic
def expand_bytes(typingctx: Any, levels: Any, scales: Any, offsets: Any, count: Any, out: Any) -> Any:
    """out[i, :16] = scales[:16] * levels[i, :16] + offsets[:16] for i < count, one fused multiply-add each.

    Addresses (integers) of uint8 [count, 16], float32 [16], float32 [16] and float32 [count, 16].
    """
    signature = types.void(*([types.intp] * 5))

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        levels, scales, offsets, count, out = args
        word, width = ir.IntType(64), 2 * LANES
        vector = ir.VectorType(ir.FloatType(), width)
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{width}f32"
        )

        def load(at: Any, kind: Any, align: int) -> Any:
            return builder.load(builder.inttoptr(at, kind.as_pointer()), align=align)

        scale, offset = load(scales, vector, 4), load(offsets, vector, 4)
        with cgutils.for_range(builder, count, intp=word) as loop:
            at = builder.add(levels, builder.shl(loop.index, word(4)))
            level = builder.zext(load(at, ir.VectorType(ir.IntType(8), width), 1), ir.VectorType(ir.IntType(32), width))
            value = builder.call(fma, [scale, builder.sitofp(level, vector), offset])
            target = builder.add(out, builder.shl(loop.index, word(6)))
            builder.store(value, builder.inttoptr(target, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, codegen


@cache
def multiply_bytes_tile(rows: int, panels: int) -> Callable[..., None]:
    """As `multiply_tile` with two vectors per panel, for one group of weights stored in bytes.

    The function takes `(x, x_row, levels, levels_panel, scales, offsets, group_panel, k, out, out_row)`:
    panel p's bytes for step kk are at levels + p * levels_panel + kk * 16, its 16 scales and offsets at
    scales (offsets) + p * group_panel * 4. Weights are expanded in registers exactly as `expand_bytes` does;
    the result is added to `out`.
    """

    @intrinsic
    def tile(
        typingctx: Any, x: Any, x_row: Any, levels: Any, levels_panel: Any, scales: Any, offsets: Any, group_panel: Any,
        k: Any, out: Any, out_row: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 10))

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _emit_bytes_tile(builder, rows, panels, args)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def _emit_bytes_tile(builder: Any, rows: int, panels: int, args: Any) -> None:
    x, x_row, levels, levels_panel, scales, offsets, group_panel, k, out, out_row = args
    word, lane = ir.IntType(64), ir.FloatType()
    vector, small = ir.VectorType(lane, LANES), ir.VectorType(ir.IntType(8), LANES)
    wide = ir.VectorType(ir.IntType(32), LANES)
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")

    def load(at: Any, kind: Any, align: int = 4) -> Any:
        return builder.load(builder.inttoptr(at, kind.as_pointer()), align=align)

    def shifted(base: Any, stride: Any, index: int, scale_bits: int, extra: int) -> Any:
        at = builder.add(base, builder.shl(builder.mul(stride, word(index)), word(scale_bits)))
        return builder.add(at, word(extra))

    columns = [(p, v) for p in range(panels) for v in range(2)]
    grid = {
        (p, v): (
            load(shifted(scales, group_panel, p, 2, v * LANES * 4), vector),
            load(shifted(offsets, group_panel, p, 2, v * LANES * 4), vector),
        )
        for p, v in columns
    }
    targets = {(i, p, v): shifted(out, out_row, i, 2, (p * 2 + v) * LANES * 4) for i in range(rows) for p, v in columns}
    sums = {key: cgutils.alloca_once_value(builder, load(at, vector)) for key, at in targets.items()}
    starts = [shifted(levels, levels_panel, p, 0, 0) for p in range(panels)]
    with cgutils.for_range(builder, k, intp=word) as loop:
        step = builder.shl(loop.index, word(4))
        weights = {}
        for p, v in columns:
            stored = load(builder.add(builder.add(starts[p], step), word(v * LANES)), small, 1)
            level = builder.sitofp(builder.zext(stored, wide), vector)
            weights[p, v] = builder.call(fma, [grid[p, v][0], level, grid[p, v][1]])
        for i in range(rows):
            value = load(builder.add(shifted(x, x_row, i, 2, 0), builder.shl(loop.index, word(2))), lane)
            value = spread(builder, value)
            for p, v in columns:
                total = builder.load(sums[i, p, v])
                builder.store(builder.call(fma, [value, weights[p, v], total]), sums[i, p, v])
    for key, at in targets.items():
        builder.store(builder.load(sums[key]), builder.inttoptr(at, vector.as_pointer()), align=4)


@intrinsic
def add_floats(typingctx: Any, out: Any, values: Any, count: Any, accumulate: Any) -> Any:
    """out[i] = values[i] (+ out[i] if `accumulate`), i < count, a multiple of LANES; addresses of float32."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        out, values, count, accumulate = args
        word, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)

        def load(at: Any) -> Any:
            return builder.load(builder.inttoptr(at, vector.as_pointer()), align=4)

        with cgutils.for_range(builder, builder.lshr(count, word(3)), intp=word) as loop:
            offset = builder.shl(loop.index, word(5))
            to, value = builder.add(out, offset), load(builder.add(values, offset))
            with builder.if_else(accumulate) as (adds, starts):
                with adds:
                    _store(builder, builder.fadd(load(to), value), to)
                with starts:
                    _store(builder, value, to)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.boolean), codegen
