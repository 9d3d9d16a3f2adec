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

from app.kernels.vectors import FLOAT, LANES, WORD, fma, load_bf16, prefetch, spread

#: Terms of one chain, a multiple of GROUP.
CHUNK = 128
#: Weights of a column that share a scale and an offset where weights are stored in bytes.
GROUP = 32
#: How far ahead of a product its weights are fetched: about what it takes while memory answers.
BYTES_AHEAD = 2048
#: The columns of one panel of weights, and their levels in bytes. LLVM splits them where vectors are shorter, which
#: costs nothing; two vectors of half the length are a fifth slower with AVX-512.
_PANEL, _LEVELS = ir.VectorType(FLOAT, 2 * LANES), ir.VectorType(ir.IntType(8), 2 * LANES)


@cache
def multiply_tile(rows: int, panels: int, vectors: int) -> Callable[..., None]:
    """A compiled-in function for a tile of `rows` x (`panels` * `vectors` * LANES) float32.

    The function takes addresses (integers) and strides counted in elements:
    `(x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate, in_bf16)`.
    x[i, kk] is at x + i * x_row + kk; w's vector for panel p at w + p * w_panel + kk * w_k; the result
    row i of panel p at out + i * out_row + p * out_panel. `ahead`: bytes behind each weight at which memory is asked
    for what comes next. `accumulate` (boolean): start from what `out` holds, else from zero. `in_bf16` (boolean): w
    holds bfloat16 values, two bytes each, which are widened in registers: the same bits as from float32. Nothing
    else is read, and nothing written, outside the tile.
    """

    @intrinsic
    def tile(
        typingctx: Any, x: Any, x_row: Any, w: Any, w_k: Any, w_panel: Any, k: Any, out: Any, out_row: Any,
        out_panel: Any, ahead: Any, accumulate: Any, in_bf16: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 10), types.boolean, types.boolean)

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
    x, x_row, w, w_k, w_panel, k, out, out_row, out_panel, ahead, accumulate = args
    vector = ir.VectorType(FLOAT, vectors * LANES)
    weight_bits = 1 if in_bf16 else 2

    def address(base: Any, *offsets: Any, size_bits: int = 2) -> Any:
        total = base
        for offset in offsets:
            total = builder.add(total, builder.shl(offset, WORD(size_bits)))
        return total

    def load(at: Any, kind: Any) -> Any:
        return builder.load(builder.inttoptr(at, kind.as_pointer()), align=4)

    targets = {
        (i, p): address(out, builder.mul(out_row, WORD(i)), builder.mul(out_panel, WORD(p)))
        for i in range(rows)
        for p in range(panels)
    }
    sums = {key: cgutils.alloca_once(builder, vector) for key in targets}
    x_rows = [address(x, builder.mul(x_row, WORD(i))) for i in range(rows)]
    w_panels = [builder.mul(w_panel, WORD(p)) for p in range(panels)]
    num_chunks = builder.lshr(builder.add(k, WORD(CHUNK - 1)), WORD(CHUNK.bit_length() - 1))
    # With nothing to sum, the result must still be written.
    num_chunks = builder.select(builder.icmp_signed("==", num_chunks, WORD(0)), WORD(1), num_chunks)
    with cgutils.for_range(builder, num_chunks, intp=WORD) as chunk:
        for total in sums.values():
            builder.store(ir.Constant(vector, [0.0] * vector.count), total)
        first = builder.mul(chunk.index, WORD(CHUNK))
        left = builder.sub(k, first)
        count = builder.select(builder.icmp_signed("<", left, WORD(CHUNK)), left, WORD(CHUNK))
        with cgutils.for_range(builder, count, intp=WORD) as loop:
            at_k = builder.add(first, loop.index)
            places = [address(w, at, builder.mul(w_k, at_k), size_bits=weight_bits) for at in w_panels]
            for at in places:
                prefetch(builder, builder.add(at, ahead))
            weights = [load_bf16(builder, at, vector) if in_bf16 else load(at, vector) for at in places]
            for i in range(rows):
                value = spread(builder, load(address(x_rows[i], at_k), FLOAT), vector)
                for p in range(panels):
                    total = sums[i, p]
                    builder.store(fma(builder, value, weights[p], builder.load(total)), total)
        _finish(builder, builder.or_(accumulate, builder.icmp_signed(">", chunk.index, WORD(0))), sums, targets)


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

        def load(at: Any, kind: Any, align: int) -> Any:
            return builder.load(builder.inttoptr(at, kind.as_pointer()), align=align)

        scale, offset = load(scales, _PANEL, 4), load(offsets, _PANEL, 4)
        with cgutils.for_range(builder, count, intp=WORD) as loop:
            at = builder.add(levels, builder.shl(loop.index, WORD(4)))
            prefetch(builder, builder.add(at, WORD(BYTES_AHEAD)))
            value = _expanded(builder, load(at, _LEVELS, 1), scale, offset)
            _store(builder, value, builder.add(out, builder.shl(loop.index, WORD(6))))
        return context.get_dummy_value()

    return signature, codegen


@cache
def multiply_bytes_tile(rows: int) -> Callable[..., None]:
    """As `multiply_tile` for one panel of 16 columns whose weights are stored in bytes, over the whole sum.

    The function takes `(x, x_row, levels, scales, offsets, depth, out, out_row, accumulate)`: the bytes of step kk are
    at levels + kk * 16; those of each `GROUP` steps share 16 scales and 16 offsets, one group after the other. Weights
    are expanded in registers exactly as `expand_bytes` does, and added in the order of `multiply_tile`.
    """

    @intrinsic
    def tile(
        typingctx: Any, x: Any, x_row: Any, levels: Any, scales: Any, offsets: Any, depth: Any, out: Any, out_row: Any,
        accumulate: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 8), types.boolean)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _emit_bytes_tile(builder, rows, args)
            return context.get_dummy_value()

        return signature, codegen

    return tile


def _emit_bytes_tile(builder: Any, rows: int, args: Any) -> None:
    x, x_row, levels, scales, offsets, depth, out, out_row, accumulate = args

    def load(at: Any, kind: Any, align: int = 4) -> Any:
        return builder.load(builder.inttoptr(at, kind.as_pointer()), align=align)

    def moved(base: Any, elements: Any, size_bits: int = 2) -> Any:
        return builder.add(base, builder.shl(elements, WORD(size_bits)))

    def at_most(value: Any, limit: int) -> Any:
        return builder.select(builder.icmp_signed("<", value, WORD(limit)), value, WORD(limit))

    x_rows = [moved(x, builder.mul(x_row, WORD(i))) for i in range(rows)]
    targets = [moved(out, builder.mul(out_row, WORD(i))) for i in range(rows)]
    sums = [cgutils.alloca_once(builder, _PANEL) for _ in range(rows)]
    num_chunks = builder.udiv(builder.add(depth, WORD(CHUNK - 1)), WORD(CHUNK))
    # With nothing to sum, the result must still be written.
    num_chunks = builder.select(builder.icmp_signed("==", num_chunks, WORD(0)), WORD(1), num_chunks)
    with cgutils.for_range(builder, num_chunks, intp=WORD) as chunk:
        for total in sums:
            builder.store(ir.Constant(_PANEL, [0.0] * _PANEL.count), total)
        first = builder.mul(chunk.index, WORD(CHUNK))
        count = at_most(builder.sub(depth, first), CHUNK)
        num_groups = builder.udiv(builder.add(count, WORD(GROUP - 1)), WORD(GROUP))
        with cgutils.for_range(builder, num_groups, intp=WORD) as group:
            start = builder.add(first, builder.mul(group.index, WORD(GROUP)))
            grid = builder.shl(builder.udiv(start, WORD(GROUP)), WORD(4))
            scale, offset = load(moved(scales, grid), _PANEL), load(moved(offsets, grid), _PANEL)
            with cgutils.for_range(builder, at_most(builder.sub(depth, start), GROUP), intp=WORD) as loop:
                k = builder.add(start, loop.index)
                at = moved(levels, k, 4)
                prefetch(builder, builder.add(at, WORD(BYTES_AHEAD)))
                weights = _expanded(builder, load(at, _LEVELS, 1), scale, offset)
                for x_at, total in zip(x_rows, sums, strict=True):
                    value = spread(builder, load(moved(x_at, k), FLOAT), _PANEL)
                    builder.store(fma(builder, value, weights, builder.load(total)), total)
        held = builder.or_(accumulate, builder.icmp_signed(">", chunk.index, WORD(0)))
        _finish(builder, held, dict(enumerate(sums)), dict(enumerate(targets)))


def _expanded(builder: Any, levels: Any, scale: Any, offset: Any) -> Any:
    """scale * levels + offset, 16 columns of a panel."""
    wide = builder.zext(levels, ir.VectorType(ir.IntType(32), _PANEL.count))
    return fma(builder, scale, builder.sitofp(wide, _PANEL), offset)


def _finish(builder: Any, adds: Any, sums: dict[Any, Any], targets: dict[Any, Any]) -> None:
    """Write the sums of one chunk to their targets, added to what these hold if `adds`."""
    with builder.if_else(adds) as (held, fresh):
        with held:
            for key, at in targets.items():
                total = builder.load(sums[key])
                there = builder.load(builder.inttoptr(at, total.type.as_pointer()), align=4)
                _store(builder, builder.fadd(there, total), at)
        with fresh:
            for key, at in targets.items():
                _store(builder, builder.load(sums[key]), at)
