"""A register-tiled multiply-accumulate as a Numba intrinsic: a tile of `out += x @ w` stays in vector registers.

Every element's terms are added in one order, whatever the tile's shape: chains of fused multiply-adds over `CHUNK`
consecutive k, each from zero, whose sums are added in the order of k. So a row's bits never depend on the number of
rows, the tile or the thread. (One long chain would lose accuracy: 2e-4 instead of 6e-5 in a 135M model's logits.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from app.kernels.machine.vectors import FLOAT, LANES, WORD, fma, load_bf16, prefetch, spread

#: Terms of one chain, a multiple of GROUP.
CHUNK = 128
#: Chunks that a tile sums side by side at most: an ordinary sum has at least as many.
_CHUNKS_AT_ONCE = 4
#: Weights of a column that share a scale and an offset where weights are stored in bytes.
GROUP = 32
#: Bytes by which weights are prefetched ahead: about the distance covered while memory answers.
BYTES_AHEAD = 2048
#: Bytes of one entry of a list of what to fetch, and the rate of one line per step; see `multiply_and_fetch_tile`.
FETCH_BLOCK, FETCH_UNIT = 256, 1 << 16
#: The columns of one panel of weights, and their levels in bytes. LLVM splits them where vectors are shorter, which
#: costs nothing; two vectors of half the length are a fifth slower with AVX-512.
_PANEL, _LEVELS = ir.VectorType(FLOAT, 2 * LANES), ir.VectorType(ir.IntType(8), 2 * LANES)
#: Row and panel in a tile; and where a tile's sums of one chunk are stored.
_Place = tuple[int, int]
_Sums = dict[_Place, Any]


@cache
def multiply_tile(most_rows: int, panels: int, vectors: int, chains: int = 1) -> Callable[..., None]:
    """An inlined function for tiles of 1 to `most_rows` rows x (`panels` * `vectors` * LANES) float32.

    If rows and panels are fewer than `chains`, several chunks are summed at a time to reach that number: a multiply-add
    takes a core several cycles, during which it can start independent ones.

    The function takes addresses (integers) and strides counted in elements: `(rows, x, x_row, w, w_k, w_panel, k, out,
    out_row, out_panel, ahead, accumulate, in_bf16)`. x[i, kk] is at x + i * x_row + kk; w's vector for panel p at w + p
    * w_panel + kk * w_k; the result row i of panel p at out + i * out_row + p * out_panel. `ahead`: distance in bytes
    at which memory behind each weight is prefetched. `accumulate` (boolean): start from the contents of `out`, else
    from zero. `in_bf16` (boolean): w holds bfloat16 values, two bytes each, which are widened in registers: the same
    bits as from float32. Nothing else is read, and nothing written, outside the tile.
    """
    counts = range(1, most_rows + 1)

    @intrinsic
    def tile(
        typingctx: Any, rows: Any, x: Any, x_row: Any, w: Any, w_k: Any, w_panel: Any, k: Any, out: Any, out_row: Any,
        out_panel: Any, ahead: Any, accumulate: Any, in_bf16: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 11), types.boolean, types.boolean)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            rows, *rest, in_bf16 = args
            with builder.if_else(in_bf16) as (narrow, wide):
                with narrow:
                    _emit_tile(builder, rows, counts, panels, vectors, rest, chains=chains, in_bf16=True)
                with wide:
                    _emit_tile(builder, rows, counts, panels, vectors, rest, chains=chains)
            return context.get_dummy_value()

        return signature, codegen

    return tile


@cache
def multiply_wide_tile(least_rows: int, most_rows: int, panels: int) -> Callable[..., None]:
    """`multiply_tile` for `least_rows` to `most_rows` rows x `panels` * 16 float32 columns, side by side in `out`.

    The function takes `(rows, x, x_row, w, w_k, w_panel, k, out, out_row, ahead, accumulate)`.
    """

    @intrinsic
    def tile(
        typingctx: Any, rows: Any, x: Any, x_row: Any, w: Any, w_k: Any, w_panel: Any, k: Any, out: Any, out_row: Any,
        ahead: Any, accumulate: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 10), types.boolean)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            rows, x, x_row, w, w_k, w_panel, k, out, out_row, ahead, accumulate = args
            rest = x, x_row, w, w_k, w_panel, k, out, out_row, WORD(_PANEL.count), ahead, accumulate
            _emit_tile(builder, rows, range(least_rows, most_rows + 1), panels, 2, rest)
            return context.get_dummy_value()

        return signature, codegen

    return tile


@cache
def multiply_and_fetch_tile(most_rows: int) -> Callable[..., None]:
    """`multiply_tile` for one panel of 16 float32 columns that also prefetches what is needed afterwards.

    The function takes `(rows, x, x_row, w, w_k, k, out, out_row, ahead, accumulate, blocks, step, rate)`. `blocks` is
    the address of a list of addresses (int64) of FETCH_BLOCK bytes each, and step kk prefetches its line of 64 bytes
    number `(step + kk) * rate / FETCH_UNIT`: evenly, because a core drops most prefetches of a burst.
    """

    @intrinsic
    def tile(
        typingctx: Any, rows: Any, x: Any, x_row: Any, w: Any, w_k: Any, k: Any, out: Any, out_row: Any, ahead: Any,
        accumulate: Any, blocks: Any, step: Any, rate: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 9), types.boolean, *([types.intp] * 3))

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            rows, x, x_row, w, w_k, k, out, out_row, ahead, accumulate, *fetch = args
            rest = x, x_row, w, w_k, WORD(0), k, out, out_row, WORD(0), ahead, accumulate
            _emit_tile(builder, rows, range(1, most_rows + 1), 1, 2, rest, fetch=_Fetch(*fetch))
            return context.get_dummy_value()

        return signature, codegen

    return tile


@cache
def multiply_bytes_tile(most_rows: int, *, fetches: bool) -> Callable[..., None]:
    """`multiply_and_fetch_tile` with weights that are stored in bytes, over the whole sum.

    The function takes `(rows, x, x_row, levels, scales, offsets, k, out, out_row, accumulate, blocks, step, rate)`: the
    bytes of step kk are at levels + kk * 16; those of each `GROUP` steps share 16 scales and 16 offsets, one group
    after the other. Weights are expanded in registers exactly as `expand_bytes` does. Without `fetches` the last three
    are ignored.
    """

    @intrinsic
    def tile(
        typingctx: Any, rows: Any, x: Any, x_row: Any, levels: Any, scales: Any, offsets: Any, k: Any, out: Any,
        out_row: Any, accumulate: Any, blocks: Any, step: Any, rate: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 9), types.boolean, *([types.intp] * 3))

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            rows, *rest = args[:10]
            _emit_bytes_tile(builder, rows, most_rows, rest, _Fetch(*args[10:]) if fetches else None)
            return context.get_dummy_value()

        return signature, codegen

    return tile


@cache
def multiply_and_expand_tile(most_rows: int) -> Callable[..., None]:
    """`multiply_bytes_tile` over at most CHUNK steps that also stores the expanded weights for further rows.

    The function takes `(rows, x, x_row, levels, scales, offsets, k, out, out_row, accumulate, expanded)`; `expanded` is
    the address of float32 [k, 16]. Expanding runs in parallel to the sums, in units that these leave idle.
    """

    @intrinsic
    def tile(
        typingctx: Any, rows: Any, x: Any, x_row: Any, levels: Any, scales: Any, offsets: Any, k: Any, out: Any,
        out_row: Any, accumulate: Any, expanded: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 9), types.boolean, types.intp)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            rows, *rest, expanded = args
            _emit_bytes_tile(builder, rows, most_rows, rest, expanded=expanded)
            return context.get_dummy_value()

        return signature, codegen

    return tile


@intrinsic
def expand_bytes(typingctx: Any, levels: Any, scales: Any, offsets: Any, count: Any, out: Any) -> Any:
    """out[i, :16] = scales[:16] * levels[i, :16] + offsets[:16] for i < count, one fused multiply-add each.

    Addresses (integers) of uint8 [count, 16], float32 [16], float32 [16] and float32 [count, 16].
    """
    signature = types.void(*([types.intp] * 5))

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        levels, scales, offsets, count, out = args
        scale, offset = _load(builder, scales, _PANEL), _load(builder, offsets, _PANEL)
        with cgutils.for_range(builder, count, intp=WORD) as loop:
            at = builder.add(levels, builder.shl(loop.index, WORD(4)))
            prefetch(builder, builder.add(at, WORD(BYTES_AHEAD)))
            value = _dequantise(builder, _load(builder, at, _LEVELS, 1), scale, offset)
            _store(builder, value, builder.add(out, builder.shl(loop.index, WORD(6))))
        return context.get_dummy_value()

    return signature, codegen


class _Fetch(NamedTuple):
    """A list of blocks to prefetch along the way; LLVM values."""

    blocks: Any
    step: Any
    rate: Any


def cases(builder: Any, num_rows: Any, counts: range) -> Iterator[int]:
    """Yield each count of rows with its own block to emit into; the block for `num_rows` is run, if there is one."""
    after = builder.append_basic_block("after.tile")
    switch = builder.switch(num_rows, after)
    for rows in counts:
        case = builder.append_basic_block(f"tile.{rows}")
        switch.add_case(WORD(rows), case)
        builder.position_at_end(case)
        yield rows
        builder.branch(after)
    builder.position_at_end(after)


def _emit_tile(
    builder: Any, num_rows: Any, counts: range, panels: int, vectors: int, args: Any, *, chains: int = 1,
    in_bf16: bool = False, fetch: _Fetch | None = None,
) -> None:  # fmt: skip
    x, x_row, w, w_k, w_panel, depth, out, out_row, out_panel, ahead, accumulate = args
    vector = ir.VectorType(FLOAT, vectors * LANES)
    w_panels = [builder.mul(w_panel, WORD(p)) for p in range(panels)]
    for rows in cases(builder, num_rows, counts):
        x_rows = [address_at(builder, x, builder.mul(x_row, WORD(i))) for i in range(rows)]
        targets = {
            (i, p): address_at(
                builder, out, builder.add(builder.mul(out_row, WORD(i)), builder.mul(out_panel, WORD(p)))
            )
            for i in range(rows)
            for p in range(panels)
        }

        def emit_steps(first: Any, count: Any, sums: list[_Sums], x_rows: list[Any] = x_rows) -> None:
            with cgutils.for_range(builder, count, intp=WORD) as loop:
                for chunk, its_sums in enumerate(sums):
                    k = builder.add(first, builder.add(loop.index, WORD(chunk * CHUNK)))
                    w_step = builder.mul(w_k, k)
                    places = [address_at(builder, w, builder.add(at, w_step), 1 if in_bf16 else 2) for at in w_panels]
                    for at in places:
                        prefetch(builder, builder.add(at, ahead))
                    _prefetch_line(builder, fetch, k)
                    load = load_bf16 if in_bf16 else _load
                    _add_step(builder, x_rows, k, [load(builder, at, vector) for at in places], its_sums)

        at_once = min(max(chains // (rows * panels), 1), _CHUNKS_AT_ONCE)
        _emit_chunks(builder, vector, targets, depth, accumulate, emit_steps, at_once)


def _emit_bytes_tile(
    builder: Any, num_rows: Any, most_rows: int, args: Any, fetch: _Fetch | None = None, expanded: Any = None
) -> None:
    x, x_row, levels, scales, offsets, depth, out, out_row, accumulate = args
    for rows in cases(builder, num_rows, range(1, most_rows + 1)):
        x_rows = [address_at(builder, x, builder.mul(x_row, WORD(i))) for i in range(rows)]
        targets = {(i, 0): address_at(builder, out, builder.mul(out_row, WORD(i))) for i in range(rows)}

        def emit_steps(first: Any, count: Any, sums: list[_Sums], x_rows: list[Any] = x_rows) -> None:
            num_groups = builder.udiv(builder.add(count, WORD(GROUP - 1)), WORD(GROUP))
            with cgutils.for_range(builder, num_groups, intp=WORD) as group:
                start = builder.add(first, builder.mul(group.index, WORD(GROUP)))
                grid = builder.mul(builder.udiv(start, WORD(GROUP)), WORD(_PANEL.count))
                scale, offset = (_load(builder, address_at(builder, base, grid), _PANEL) for base in (scales, offsets))
                left = _at_most(builder, builder.sub(depth, start), GROUP)
                with cgutils.for_range(builder, left, intp=WORD) as loop:
                    k = builder.add(start, loop.index)
                    at = builder.add(levels, builder.mul(k, WORD(_PANEL.count)))
                    prefetch(builder, builder.add(at, WORD(BYTES_AHEAD)))
                    _prefetch_line(builder, fetch, k)
                    weights = _dequantise(builder, _load(builder, at, _LEVELS, 1), scale, offset)
                    if expanded is not None:
                        _store(builder, weights, address_at(builder, expanded, builder.mul(k, WORD(_PANEL.count))))
                    _add_step(builder, x_rows, k, [weights], sums[0])

        _emit_chunks(builder, _PANEL, targets, depth, accumulate, emit_steps)


def _emit_chunks(
    builder: Any, vector: Any, targets: dict[_Place, Any], depth: Any, accumulate: Any, emit_steps: Callable[..., None],
    at_once: int = 1,
) -> None:  # fmt: skip
    """Sum chunk by chunk into `targets`, whole chunks `at_once` side by side as long as there are so many.

    `emit_steps(first, count, sums)` adds the terms of len(sums) chunks, of which the first begins at `first`; each
    has `count` terms.
    """
    sums = [{place: cgutils.alloca_once(builder, vector) for place in targets} for _ in range(at_once)]

    def emit(first: Any, count: Any, sums: list[_Sums]) -> None:
        _zero(builder, vector, sums)
        emit_steps(first, count, sums)
        _add_to_targets(builder, vector, targets, sums, accumulate, first)

    begin = WORD(0)
    if at_once > 1:
        steps = WORD(at_once * CHUNK)
        num_groups = builder.udiv(depth, steps)
        with cgutils.for_range(builder, num_groups, intp=WORD) as group:
            emit(builder.mul(group.index, steps), WORD(CHUNK), sums)
        begin = builder.mul(num_groups, steps)
    num_chunks = builder.udiv(builder.add(builder.sub(depth, begin), WORD(CHUNK - 1)), WORD(CHUNK))
    # With nothing to sum, the result must still be written.
    num_chunks = builder.select(builder.icmp_signed("==", depth, WORD(0)), WORD(1), num_chunks)
    with cgutils.for_range(builder, num_chunks, intp=WORD) as chunk:
        first = builder.add(begin, builder.mul(chunk.index, WORD(CHUNK)))
        emit(first, _at_most(builder, builder.sub(depth, first), CHUNK), sums[:1])


def _zero(builder: Any, vector: Any, sums: list[_Sums]) -> None:
    for its_sums in sums:
        for total in its_sums.values():
            builder.store(ir.Constant(vector, [0.0] * vector.count), total)


def _add_to_targets(
    builder: Any, vector: Any, targets: dict[_Place, Any], sums: list[_Sums], accumulate: Any, first: Any
) -> None:
    """Add up chunks in the order of k; the first of them begins at `first`."""
    with builder.if_else(builder.or_(accumulate, builder.icmp_signed(">", first, WORD(0)))) as (held, fresh):
        for block, is_held in ((held, True), (fresh, False)):
            with block:
                for place, at in targets.items():
                    totals = [builder.load(its_sums[place]) for its_sums in sums]
                    total = _load(builder, at, vector) if is_held else totals.pop(0)
                    for term in totals:
                        total = builder.fadd(total, term)
                    _store(builder, total, at)


def _add_step(builder: Any, x_rows: list[Any], k: Any, weights: list[Any], sums: _Sums) -> None:
    """sums[i, p] += x_rows[i][k] * weights[p]."""
    for i, row in enumerate(x_rows):
        value = spread(builder, _load(builder, address_at(builder, row, k), FLOAT), weights[0].type)
        for p, weight in enumerate(weights):
            total = sums[i, p]
            builder.store(fma(builder, value, weight, builder.load(total)), total)


def _prefetch_line(builder: Any, fetch: _Fetch | None, k: Any) -> None:
    """Prefetch step k's line of a list, if there is one; see `multiply_and_fetch_tile`."""
    if fetch is None:
        return
    lines = FETCH_BLOCK // 64
    line = builder.udiv(builder.mul(builder.add(fetch.step, k), fetch.rate), WORD(FETCH_UNIT))
    block = _load(builder, address_at(builder, fetch.blocks, builder.udiv(line, WORD(lines)), 3), WORD, 8)
    prefetch(builder, address_at(builder, block, builder.and_(line, WORD(lines - 1)), 6))


def address_at(builder: Any, base: Any, elements: Any, size_bits: int = 2) -> Any:
    """The address `elements` of 2**size_bits bytes behind `base`."""
    return builder.add(base, builder.shl(elements, WORD(size_bits)))


def _at_most(builder: Any, value: Any, limit: int) -> Any:
    return builder.select(builder.icmp_signed("<", value, WORD(limit)), value, WORD(limit))


def _load(builder: Any, at: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.inttoptr(at, kind.as_pointer()), align=align)


def _store(builder: Any, value: Any, at: Any) -> None:
    builder.store(value, builder.inttoptr(at, value.type.as_pointer()), align=4)


def _dequantise(builder: Any, levels: Any, scale: Any, offset: Any) -> Any:
    """scale * levels + offset, 16 columns of a panel."""
    wide = builder.zext(levels, ir.VectorType(ir.IntType(32), _PANEL.count))
    return fma(builder, scale, builder.sitofp(wide, _PANEL), offset)
