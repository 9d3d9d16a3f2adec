"""Products in bfloat16 by Intel's AMX: tiles of 16 rows x 16 columns, 32 steps of the sum in one instruction.

A thread's tile configuration is restored after each product, because other code on the thread may keep its own: oneDNN
does. What tiles hold is not: like all vector registers, no code expects it to survive a call.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from app.kernels.machine.jit import jit
from app.kernels.machine.simd import BYTES_AHEAD
from app.kernels.machine.vectors import WORD, prefetch

#: arch_prctl(2) on x86-64, its request for permission to use an extended state, and that of tile data.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

_BYTE = ir.IntType(8)
#: Rows of a tile, bytes of one of its rows, and of a whole tile.
_ROWS, _ROW_BYTES, _TILE_BYTES = 16, 64, 1024
#: The tiles of sums are the last four; rows of x and weights share the others.
_FIRST_SUM, _NUM_OTHERS = 4, 4
#: Panels that up to 16 rows take at a time, and more rows: the core adds to four tiles in turn, because a sum takes it
#: 52 cycles, and the next to another tile can begin after 16.
_FEW_PANELS, _MANY_PANELS = 4, 2
#: Rows that pass by a part of the weights at a time, and blocks of 32 k in such a part: both stay in the second-level
#: cache, and two panels of the part (32 KB) in the first-level one.
_MOST_ROWS, _BLOCKS = 512, 16
#: With more rows than this, weights are in a cache when they are used, and nothing is prefetched.
_MOST_FETCHING = 64


@cache
def is_permitted() -> bool:
    """Whether this process may use tiles: Linux asks for a request before their first use, by any thread.

    It refuses a process in which a thread's alternative signal stack is too small for them.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTE.as_pointer())


def _config_function(instruction: str) -> Callable[..., None]:
    """An inlined function that takes the address of a tile configuration, 64 bytes."""

    @intrinsic
    def function(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _call(builder, instruction, _pointer(builder, args[0]))
            return context.get_dummy_value()

        return types.void(types.intp), codegen

    return cast(Callable[..., None], function)


#: Configure this thread's tiles, whose contents become zero; write its configuration: zeros, without one.
_load_config, _store_config = _config_function("ldtilecfg"), _config_function("sttilecfg")


@cache
def _tiles(row_tiles: int, panels: int) -> Callable[..., None]:
    """An inlined function for `row_tiles` (1 or 2) x `panels` tiles of sums, over a number of blocks.

    It takes `(x, x_block, w, w_panel, num_blocks, out, out_row, fresh, ahead)`: addresses, and distances in bytes
    between blocks of x, panels of w and rows of out; fresh (boolean): begin at zero, not with what out holds; ahead
    (boolean): prefetch weights.
    """

    @intrinsic
    def tiles(
        typingctx: Any, x: Any, x_block: Any, w: Any, w_panel: Any, num_blocks: Any, out: Any, out_row: Any,
        fresh: Any, ahead: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*([types.intp] * 7), types.boolean, types.boolean)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            x, x_block, w, w_panel, num_blocks, out, out_row, fresh, ahead = args
            sums = {}
            for i in range(row_tiles):
                for p in range(panels):
                    row = builder.add(out, builder.mul(out_row, WORD(i * _ROWS)))
                    sums[i, p] = (
                        _BYTE(_FIRST_SUM + 2 * i + p),
                        _pointer(builder, builder.add(row, WORD(p * _ROW_BYTES))),
                    )
            with builder.if_else(fresh) as (zero, held):
                with zero:
                    for tile, _ in sums.values():
                        _call(builder, "tilezero", tile)
                with held:
                    for tile, at in sums.values():
                        _call(builder, "tileloadd64", tile, at, out_row)
            with cgutils.for_range(builder, num_blocks, intp=WORD) as loop:
                rows = builder.add(x, builder.mul(loop.index, x_block))
                block = builder.add(w, builder.mul(loop.index, WORD(_TILE_BYTES)))
                for i in range(row_tiles):
                    at = _pointer(builder, builder.add(rows, WORD(i * _TILE_BYTES)))
                    _call(builder, "tileloadd64", _BYTE(i), at, WORD(_ROW_BYTES))
                for p in range(panels):
                    at = builder.add(block, builder.mul(w_panel, WORD(p)))
                    weights = _BYTE(row_tiles + p % (_NUM_OTHERS - row_tiles))
                    _call(builder, "tileloadd64", weights, _pointer(builder, at), WORD(_ROW_BYTES))
                    with builder.if_then(ahead):
                        for line in range(0, _TILE_BYTES, _ROW_BYTES):
                            prefetch(builder, builder.add(at, WORD(BYTES_AHEAD + line)))
                    for i in range(row_tiles):
                        _call(builder, "tdpbf16ps", sums[i, p][0], _BYTE(i), weights)
            for tile, at in sums.values():
                _call(builder, "tilestored64", tile, at, out_row)
            return context.get_dummy_value()

        return signature, codegen

    return cast(Callable[..., None], tiles)


_one_by_four, _one_by_two, _one_by_one = _tiles(1, 4), _tiles(1, 2), _tiles(1, 1)
_two_by_two, _two_by_one = _tiles(2, 2), _tiles(2, 1)


@jit
def _configure(config, rows, second):
    """Tiles for one tile of `rows` rows (second = 0), or one of 16 and one of `second` rows.

    config: uint8 [64], scratch: the palette, bytes per row in pairs of bytes from 16 on, and rows from 48 on.
    """
    config[:] = 0
    config[0] = 1
    for tile in range(_FIRST_SUM + _NUM_OTHERS):
        config[16 + 2 * tile], config[48 + tile] = _ROW_BYTES, _ROWS
    if second > 0:
        config[49], config[54], config[55] = second, second, second
    else:
        config[48] = rows
        for tile in range(_FIRST_SUM, _FIRST_SUM + _NUM_OTHERS):
            config[48 + tile] = rows
    _load_config(config.ctypes.data)


@jit
def _multiply_part(x, x_block, w, w_panel, num_panels, num_blocks, num_rows, out, out_row, fresh, config):
    """out [num_rows, 16 * num_panels] = or, unless fresh, += num_blocks blocks of x and w, all by addresses."""
    ahead, shape = num_rows <= _MOST_FETCHING, -1
    for start in range(0, num_rows, 2 * _ROWS):
        rows = min(_ROWS, num_rows - start)
        second = min(_ROWS, num_rows - start - rows)
        if shape != rows + second:
            shape = rows + second
            _configure(config, rows, second)
        at, to = x + start * _ROW_BYTES, out + start * out_row
        p = 0
        while second == 0 and num_panels - p >= _FEW_PANELS:
            _one_by_four(at, x_block, w + p * w_panel, w_panel, num_blocks, to + p * _ROW_BYTES, out_row, fresh, ahead)
            p += _FEW_PANELS
        while num_panels - p >= _MANY_PANELS:
            panel, its_out = w + p * w_panel, to + p * _ROW_BYTES
            if second > 0:
                _two_by_two(at, x_block, panel, w_panel, num_blocks, its_out, out_row, fresh, ahead)
            else:
                _one_by_two(at, x_block, panel, w_panel, num_blocks, its_out, out_row, fresh, ahead)
            p += _MANY_PANELS
        if p < num_panels:
            panel, its_out = w + p * w_panel, to + p * _ROW_BYTES
            if second > 0:
                _two_by_one(at, x_block, panel, 0, num_blocks, its_out, out_row, fresh, ahead)
            else:
                _one_by_one(at, x_block, panel, 0, num_blocks, its_out, out_row, fresh, ahead)


@jit
def multiply_amx_panels(values, first_row, total_rows, w, first, end, out, accumulate):
    """`multiply_bf16_panels` by tiles; values: uint16, w: one layer's pairs."""
    num_rows, num_blocks = out.shape[0], w.shape[1]
    at_once = _FEW_PANELS if num_rows <= _ROWS else _MANY_PANELS
    part = num_blocks if num_rows <= 2 * _ROWS else _BLOCKS
    saved, config = np.empty(64, np.uint8), np.empty(64, np.uint8)
    sums = np.empty((min(num_rows, _MOST_ROWS) if accumulate else 0, at_once * _ROWS), np.float32)
    x_block, w_panel, width = total_rows * _ROW_BYTES, num_blocks * _TILE_BYTES, sums.shape[1]
    _store_config(saved.ctypes.data)
    for start in range(0, num_rows, _MOST_ROWS):
        count = min(_MOST_ROWS, num_rows - start)
        x = values.ctypes.data + (first_row + start) * _ROW_BYTES
        for p in range(first, end, at_once):
            num_panels = min(at_once, end - p)
            to, to_row = out.ctypes.data + start * out.strides[0] + p * _ROW_BYTES, out.strides[0]
            if accumulate:
                to, to_row = sums.ctypes.data, width * 4
            for block in range(0, num_blocks, part):
                at = w.ctypes.data + p * w_panel + block * _TILE_BYTES
                _multiply_part(
                    x + block * x_block, x_block, at, w_panel, num_panels, min(part, num_blocks - block), count, to,
                    to_row, block == 0, config,
                )  # fmt: skip
            if accumulate:
                for i in range(count):
                    row, own = out[start + i, p * _ROWS : (p + num_panels) * _ROWS], sums[i]
                    for c in range(row.shape[0]):
                        row[c] = row[c] + own[c]
    _load_config(saved.ctypes.data)
