"""A register tile of `app.kernels.int8_matmul.reference`, as Numba intrinsics: one form per instruction set.

A form only decides how the integer sums of a group are computed. They are exact, and the float arithmetic around them
is the same code for all, so every form gives the same bits; `self_test` checks that on each machine.
"""

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

_BYTE = ir.IntType(8)
#: Consecutive values of k that lie side by side for each column, and the columns of a panel.
QUAD, PANEL = 4, 16
#: Bytes of one quad of all the panel's columns.
_QUAD_BYTES = QUAD * PANEL


class Form(NamedTuple):
    """How one instruction set sums a group's products. It works on vectors of `lanes` columns.

    kind: the LLVM type of a running sum. step(builder, sum, weights, values): add the products of a quad, weights <4 *
    lanes x i8> unsigned, values likewise but signed. total(builder, sum): the sums <lanes x i32>. halves: a sum has
    room for levels below 16 only, so that levels of 8 bits take two passes.
    """

    lanes: int
    kind: Any
    step: Callable[[Any, Any, Any, Any], Any]
    total: Callable[[Any, Any], Any]
    halves: bool


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _spread_constant(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


_INTS, _PAIRS = ir.VectorType(INT, 8), ir.VectorType(ir.IntType(16), 16)


def _avx2_step(builder: Any, total: Any, weights: Any, values: Any) -> Any:
    """16-bit sums of pairs: 8 quads of levels below 16 add up to at most 8 * 2 * 15 * 127 = 30,480, below 2**15."""
    return builder.add(total, _call(builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, weights, values))


def _avx2_total(builder: Any, total: Any) -> Any:
    return _call(builder, "llvm.x86.avx2.pmadd.wd", _INTS, total, _spread_constant(_PAIRS, 1))


def _portable_step(builder: Any, total: Any, weights: Any, values: Any) -> Any:
    weights, values = builder.bitcast(weights, _INTS), builder.bitcast(values, _INTS)
    for j in range(QUAD):
        level = builder.and_(builder.lshr(weights, _spread_constant(_INTS, 8 * j)), _spread_constant(_INTS, 255))
        value = builder.ashr(builder.shl(values, _spread_constant(_INTS, 24 - 8 * j)), _spread_constant(_INTS, 24))
        total = builder.add(total, builder.mul(level, value))
    return total


def _vnni_form(lanes: int, name: str) -> Form:
    kind = ir.VectorType(INT, lanes)

    def step(builder: Any, total: Any, weights: Any, values: Any) -> Any:
        return _call(builder, name, kind, total, weights, values)

    return Form(lanes, kind, step, lambda _, total: total, halves=False)


#: By name; `machine_forms` says which a processor has.
FORMS = {
    "avx512-vnni": _vnni_form(16, "llvm.x86.avx512.vpdpbusd.512"),
    "avx2": Form(8, _PAIRS, _avx2_step, _avx2_total, halves=True),
    "portable": Form(8, _INTS, _portable_step, lambda _, total: total, halves=False),
}


@cache
def int8_panel(form_name: str, level_bits: int) -> Callable[..., None]:
    """An inlined function that multiplies rows by one panel, over the whole sum.

    It takes addresses and counts: `(values, x_scales, x_sums, stride, num_rows, levels, scales, offsets, num_groups,
    out, dots)`. values: int8 [num_groups, stride, 32], of which the first num_rows rows are read; x_scales, x_sums:
    float32 [num_groups, stride]; levels: the panel's, in the layout of `pack_dot`, of 4 or 8 bits each; scales,
    offsets: the panel's float32 [num_groups, 16]; out: float32 [num_rows, 16], written; dots: int32 [num_rows, 16],
    scratch.

    The sums of up to `_MOST_HELD` rows stay in registers. Of more, each group's weights are unpacked once, into as many
    registers as a group has quads, and all rows pass by.
    """
    form = FORMS[form_name]

    @intrinsic
    def panel(
        typingctx: Any, values: Any, x_scales: Any, x_sums: Any, stride: Any, num_rows: Any, levels: Any, scales: Any,
        offsets: Any, num_groups: Any, out: Any, dots: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 11))

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            at = _Operands(*args)
            is_small = builder.icmp_signed("<=", at.num_rows, WORD(_MOST_HELD))
            with builder.if_else(is_small) as (small, large):
                with small:
                    for rows in cases(builder, at.num_rows, range(1, _MOST_HELD + 1)):
                        _emit_held_rows(builder, form, level_bits, rows, at)
                with large:
                    _emit_passing_rows(builder, form, level_bits, at)
            return context.get_dummy_value()

        return signature, codegen

    return cast(Callable[..., None], panel)


#: Rows whose sums stay in registers.
_MOST_HELD = 3


class _Operands(NamedTuple):
    """LLVM values; see `int8_panel`."""

    values: Any
    x_scales: Any
    x_sums: Any
    stride: Any
    num_rows: Any
    levels: Any
    scales: Any
    offsets: Any
    num_groups: Any
    out: Any
    dots: Any


class _Group(NamedTuple):
    """One group's weights of `lanes` columns: vectors for each pass over a row's quads, scales, offsets."""

    passes: list[list[Any]]
    scale: Any
    offset: Any


def _emit_held_rows(builder: Any, form: Form, level_bits: int, rows: int, at: _Operands) -> None:
    floats = ir.VectorType(FLOAT, form.lanes)
    parts = range(PANEL // form.lanes)
    sums = {(i, v): cgutils.alloca_once(builder, floats) for i in range(rows) for v in parts}
    for total in sums.values():
        builder.store(ir.Constant(floats, [0.0] * form.lanes), total)
    with cgutils.for_range(builder, at.num_groups, intp=WORD) as loop:
        first_row = builder.mul(loop.index, at.stride)
        for v in parts:
            group = _load_group(builder, form, level_bits, at, loop.index, v)
            for i in range(rows):
                row = builder.add(first_row, WORD(i))
                dots = [_dot(builder, form, group.passes[n], at, row) for n in range(len(group.passes))]
                total = _add_scaled(builder, group, _join(builder, dots), at, row, builder.load(sums[i, v]))
                builder.store(total, sums[i, v])
    for (i, v), total in sums.items():
        _store(builder, builder.load(total), _place(builder, at.out, WORD(i), v * form.lanes))


def _emit_passing_rows(builder: Any, form: Form, level_bits: int, at: _Operands) -> None:
    floats, ints = ir.VectorType(FLOAT, form.lanes), ir.VectorType(INT, form.lanes)
    with cgutils.for_range(builder, builder.mul(at.num_rows, WORD(PANEL // form.lanes)), intp=WORD) as loop:
        zero = ir.Constant(floats, [0.0] * form.lanes)
        _store(builder, zero, address_at(builder, at.out, builder.mul(loop.index, WORD(form.lanes))))
    with cgutils.for_range(builder, at.num_groups, intp=WORD) as groups:
        first_row = builder.mul(groups.index, at.stride)
        for v in range(PANEL // form.lanes):
            group = _load_group(builder, form, level_bits, at, groups.index, v)
            last = len(group.passes) - 1
            for number, weights in enumerate(group.passes):
                # The integer sums of an earlier pass wait in memory: a second set of weights finds no registers.
                with cgutils.for_range(builder, at.num_rows, intp=WORD) as rows:
                    row = builder.add(first_row, rows.index)
                    dot = _dot(builder, form, weights, at, row)
                    if number > 0:
                        place = _place(builder, at.dots, rows.index, 0)
                        dot = _join(builder, [_load(builder, place, ints), dot])
                    if number < last:
                        _store(builder, dot, _place(builder, at.dots, rows.index, 0))
                        continue
                    place = _place(builder, at.out, rows.index, v * form.lanes)
                    total = _add_scaled(builder, group, dot, at, row, _load(builder, place, floats))
                    _store(builder, total, place)


def _load_group(builder: Any, form: Form, level_bits: int, at: _Operands, group: Any, part: int) -> _Group:
    """Unpack the weights of one group, vector number `part` of the panel."""
    floats, quad_kind = ir.VectorType(FLOAT, form.lanes), ir.VectorType(_BYTE, QUAD * form.lanes)
    num_bytes = GROUP * PANEL * level_bits // 8
    levels = builder.add(at.levels, builder.mul(group, WORD(num_bytes)))
    for line in range(0, num_bytes // (PANEL // form.lanes), 64):
        ahead = BYTES_AHEAD + line + part * num_bytes * form.lanes // PANEL
        prefetch(builder, builder.add(levels, WORD(ahead)))
    vectors = [
        _load(builder, builder.add(levels, WORD(quad * _QUAD_BYTES + part * QUAD * form.lanes)), quad_kind, 1)
        for quad in range(GROUP // QUAD * level_bits // 8)
    ]
    column = builder.add(builder.mul(group, WORD(PANEL)), WORD(part * form.lanes))
    scale, offset = (_load(builder, address_at(builder, base, column), floats) for base in (at.scales, at.offsets))
    if level_bits == 8 and not form.halves:
        return _Group([vectors], scale, offset)
    low, high = [_low_bits(builder, w) for w in vectors], [_high_bits(builder, w) for w in vectors]
    # Of 4-bit levels the upper bits hold the group's second half; of 8-bit ones, the sums that count 16 times.
    return _Group([low + high] if level_bits == 4 else [low, high], scale, offset)


def _low_bits(builder: Any, levels: Any) -> Any:
    return builder.and_(levels, _spread_constant(levels.type, 15))


def _high_bits(builder: Any, levels: Any) -> Any:
    """No processor shifts bytes: pairs are shifted, and what comes from the neighbour is masked."""
    pairs = ir.VectorType(ir.IntType(16), levels.type.count // 2)
    shifted = builder.lshr(builder.bitcast(levels, pairs), _spread_constant(pairs, 4))
    return _low_bits(builder, builder.bitcast(shifted, levels.type))


def _dot(builder: Any, form: Form, weights: list[Any], at: _Operands, row: Any) -> Any:
    """The integer sums of one row's group with a list of weights, one vector for each quad."""
    address = builder.add(at.values, builder.mul(row, WORD(GROUP)))
    total = _spread_constant(form.kind, 0)
    for quad, vector in enumerate(weights):
        value = _load(builder, builder.add(address, WORD(quad * QUAD)), INT)
        value = builder.bitcast(spread(builder, value, ir.VectorType(INT, form.lanes)), vector.type)
        total = form.step(builder, total, vector, value)
    return form.total(builder, total)


def _join(builder: Any, dots: list[Any]) -> Any:
    """The sums of whole levels from those of their lower and upper four bits; a single one is returned."""
    if len(dots) == 1:
        return dots[0]
    low, high = dots
    return builder.add(low, builder.shl(high, _spread_constant(high.type, 4)))


def _add_scaled(builder: Any, group: _Group, dot: Any, at: _Operands, row: Any, total: Any) -> Any:
    """total + (scale * x_scale) * dot + offset * x_sum: two fused multiply-adds."""
    x_scale, x_sum = (
        spread(builder, _load(builder, address_at(builder, base, row), FLOAT), total.type)
        for base in (at.x_scales, at.x_sums)
    )
    factor = builder.fmul(x_scale, group.scale)
    total = fma(builder, builder.sitofp(dot, total.type), factor, total)
    return fma(builder, group.offset, x_sum, total)


def _place(builder: Any, base: Any, row: Any, column: int) -> Any:
    """The address of a column in a row of 16 float32 or int32."""
    return address_at(builder, base, builder.add(builder.mul(row, WORD(PANEL)), WORD(column)))


def _load(builder: Any, at: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.inttoptr(at, kind.as_pointer()), align=align)


def _store(builder: Any, value: Any, at: Any) -> None:
    builder.store(value, builder.inttoptr(at, value.type.as_pointer()), align=4)
