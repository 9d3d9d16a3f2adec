"""Copies adapters into the CPU's LoRA rows: a whole adapter in one compiled call, module by module on any thread.

`packing` places the matrices in memory, `sgmv.cpu` defines the layout. b is copied in runs of sixteen columns; a is
transposed from rows to panels of eight in blocks that stay in registers. An adapter whose values are all exact in
bfloat16 is written in two bytes per value, without looking first: the first value that does not fit restarts the copy
in float32. The cost is the memory's bandwidth: rank 16 on every module of a 135M model is 19.5 MB to read in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import claim_piece, finish_phase
from app.kernels.machine.vectors import INT, INTS, LANES, WORD, across, load_bf16
from app.kernels.matmul.cpu import PANEL

#: Panels of b that are filled together.
_PANELS_AT_ONCE = 4
#: Columns of a copy task, which is one module's: addresses and sizes, int64.
A, B, RANK, D_IN, D_OUT, TO_A, TO_B, A_SIZE, B_SIZE = range(9)
COPY_TASK_WIDTH = 9
_FACTS = [A, B, RANK, D_IN, D_OUT, A_SIZE, B_SIZE]


@intrinsic
def _turn_block(typingctx: Any, source: Any, stride: Any, size: Any, to: Any, in_bf16: Any) -> Any:
    """to[k * 8 + lane] = source[lane * stride + k] for k and lane below 8; addresses, stride in bytes.

    size: bytes of a value in the source, 2 for bfloat16 or 4 for float32. `in_bf16` (boolean): write two bytes per
    value; returns the bits that this cuts off, or-ed over all values.
    """

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, stride, size, to, in_bf16 = args
        places = [builder.add(source, builder.mul(stride, WORD(lane))) for lane in range(LANES)]
        rows = _load_vectors(builder, places, size)

        def interleave(one: Any, other: Any, order: list[int]) -> Any:
            mask = ir.Constant(INTS, order)
            return builder.shuffle_vector(one, other, mask)

        # Three rounds of interleaving: rows r and r + 4, each time, give rows 2 r and 2 r + 1.
        low = [0, 8, 1, 9, 2, 10, 3, 11]
        for _ in range(3):
            pairs = [(rows[r], rows[r + 4]) for r in range(4)]
            rows = [interleave(*pair, [i + half for i in low]) for pair in pairs for half in (0, 4)]
        return _store_vectors(builder, rows, to, in_bf16)

    return types.int32(*([types.intp] * 4), types.boolean), codegen


@intrinsic
def _copy_panel(typingctx: Any, source: Any, size: Any, to: Any, in_bf16: Any) -> Any:
    """to[i] = source[i] for i below 16; addresses, `size`, `in_bf16` and the result as in `_turn_block`."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, size, to, in_bf16 = args
        places = [builder.add(source, builder.mul(size, WORD(part * LANES))) for part in range(PANEL // LANES)]
        return _store_vectors(builder, _load_vectors(builder, places, size), to, in_bf16)

    return types.int32(*([types.intp] * 3), types.boolean), codegen


def _load_vectors(builder: Any, places: list[Any], size: Any) -> list[Any]:
    """Bits of LANES float32 from each place, where values have `size` bytes."""
    rows = [cgutils.alloca_once(builder, INTS) for _ in places]
    with builder.if_else(builder.icmp_signed("==", size, WORD(2))) as (narrow, wide):
        with narrow:
            for row, at in zip(rows, places, strict=True):
                builder.store(builder.bitcast(load_bf16(builder, at), INTS), row)
        with wide:
            for row, at in zip(rows, places, strict=True):
                builder.store(builder.load(builder.inttoptr(at, INTS.as_pointer()), align=4), row)
    return [builder.load(row) for row in rows]


def _store_vectors(builder: Any, vectors: list[Any], to: Any, in_bf16: Any) -> Any:
    """Store bits of LANES float32 each, one after the other at `to`; returns the bits cut off, or-ed over all."""
    small = ir.VectorType(ir.IntType(16), LANES)
    cut = cgutils.alloca_once_value(builder, INT(0))
    builder.store(INT(0), cut)
    with builder.if_else(in_bf16) as (narrow, wide):
        with narrow:
            bits = vectors[0]
            for index, vector in enumerate(vectors):
                bits = builder.or_(bits, vector)
                half = builder.trunc(builder.lshr(vector, ir.Constant(INTS, [16] * LANES)), small)
                at = builder.add(to, WORD(index * 2 * LANES))
                builder.store(half, builder.inttoptr(at, small.as_pointer()), align=2)
            together = across(builder, bits, lambda builder, a, b: builder.or_(a, b))
            builder.store(builder.and_(together, INT(0xFFFF)), cut)
        with wide:
            for index, vector in enumerate(vectors):
                at = builder.add(to, WORD(index * 4 * LANES))
                builder.store(vector, builder.inttoptr(at, INTS.as_pointer()), align=4)
    return builder.load(cut)


@intrinsic
def _copy_one(typingctx: Any, source: Any, size: Any, to: Any, in_bf16: Any) -> Any:
    """One value; `size`, `in_bf16` and the result as in `_turn_block`."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, size, to, in_bf16 = args
        found = cgutils.alloca_once(builder, INT)
        with builder.if_else(builder.icmp_signed("==", size, WORD(2))) as (narrow, wide):
            with narrow:
                half = builder.load(builder.inttoptr(source, ir.IntType(16).as_pointer()))
                builder.store(builder.shl(builder.zext(half, INT), INT(16)), found)
            with wide:
                builder.store(builder.load(builder.inttoptr(source, INT.as_pointer())), found)
        bits = builder.load(found)
        with builder.if_else(in_bf16) as (narrow, wide):
            with narrow:
                half = builder.trunc(builder.lshr(bits, INT(16)), ir.IntType(16))
                builder.store(half, builder.inttoptr(to, ir.IntType(16).as_pointer()))
            with wide:
                builder.store(bits, builder.inttoptr(to, INT.as_pointer()))
        return builder.select(in_bf16, builder.and_(bits, INT(0xFFFF)), INT(0))

    return types.int32(*([types.intp] * 3), types.boolean), codegen


@intrinsic
def _zero_bytes(typingctx: Any, to: Any, count: Any) -> Any:
    """Zero `count` bytes from the address on."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        to, count = args
        cgutils.memset(builder, builder.inttoptr(to, ir.IntType(8).as_pointer()), count, 0)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@jit
def _write_a(a, size, rank, d_in, to_a, width, in_bf16):
    """a [r, d_in] as panels of eight rows; size, width: bytes of a value in a and to_a. Returns the bits cut off."""
    row, first, cut = d_in * size, 0, np.int32(0)
    while first < rank:
        count = min(LANES, rank - first)
        source, to = a + first * row, to_a + first * d_in * width
        k = 0
        if count == LANES:
            while k + LANES <= d_in:
                cut |= _turn_block(source + k * size, row, size, to + k * LANES * width, in_bf16)
                k += LANES
        while k < d_in:
            for lane in range(count):
                cut |= _copy_one(source + lane * row + k * size, size, to + (k * LANES + lane) * width, in_bf16)
            _zero_bytes(to + (k * LANES + count) * width, (LANES - count) * width)
            k += 1
        first += LANES
    return cut


@jit
def _write_b(b, size, rank, d_out, to_b, width, in_bf16):
    """Write b [r, d_out] as panels of 16 columns, zero-filled; the rest as in `_write_a`."""
    num_whole, panel, cut = d_out // PANEL, 0, np.int32(0)
    while panel < num_whole:  # a few at a time: longer runs to read, few places to write
        end = min(panel + _PANELS_AT_ONCE, num_whole)
        for i in range(rank):
            for p in range(panel, end):
                to = to_b + (p * rank + i) * width * PANEL
                cut |= _copy_panel(b + (i * d_out + p * PANEL) * size, size, to, in_bf16)
        panel = end
    left = d_out - num_whole * PANEL
    if left > 0:
        for i in range(rank):
            source = b + (i * d_out + num_whole * PANEL) * size
            to = to_b + (num_whole * rank + i) * width * PANEL
            for column in range(left):
                cut |= _copy_one(source + column * size, size, to + column * width, in_bf16)
            _zero_bytes(to + left * width, (PANEL - left) * width)
    return cut


@jit
def _copy_module(task, in_bf16):
    """Copy one module, in two bytes per value with `in_bf16`; returns whether these hold all values."""
    width = 2 if in_bf16 else 4
    cut = _write_a(task[A], task[A_SIZE], task[RANK], task[D_IN], task[TO_A], width, in_bf16)
    cut |= _write_b(task[B], task[B_SIZE], task[RANK], task[D_OUT], task[TO_B], width, in_bf16)
    return cut == 0


@jit
def copy_matrices(team, phase, tasks, too_fine):
    """Carry out copy tasks [M, COPY_TASK_WIDTH] int64, see `Packing`; in bfloat16 if that is exact for all values.

    too_fine: [1] bool, False before (True: do not try bfloat16); afterwards whether the rows are float32. Two phases.
    """
    for attempt in range(2):
        done = 0
        index = claim_piece(team, phase)
        while index < tasks.shape[0]:
            if too_fine[0] == (attempt == 1) and not _copy_module(tasks[index], attempt == 0):
                too_fine[0] = True
            done += 1
            index = claim_piece(team, phase)
        phase = finish_phase(team, phase, tasks.shape[0], done)
    return phase


class Matrices(NamedTuple):
    """Addresses and sizes of an adapter's matrices, module by module; this object keeps the arrays alive.

    layers, modules: [M] int64. facts: [M, 7] int64, the columns `_FACTS` of a copy task. arrays: the arrays that facts
    point to.
    """

    layers: NDArray[np.int64]
    modules: NDArray[np.int64]
    facts: NDArray[np.int64]
    arrays: tuple[NDArray[Any], ...]


def matrices(modules: Iterable[tuple[int, int, NDArray[Any], NDArray[Any]]]) -> Matrices:
    """`Matrices` of (layer, module, a [r, d_in], b [r, d_out]), each array in float32 or in bfloat16; copied if not
    contiguous.
    """
    places, facts, arrays = [], [], []
    for layer, n, *pair in modules:
        a, b = map(np.ascontiguousarray, pair)
        arrays += [a, b]
        places.append((layer, n))
        facts.append((_address(a), _address(b), len(a), a.shape[1], b.shape[1], a.itemsize, b.itemsize))
    layers, numbers = np.array(places, np.int64).reshape(-1, 2).T
    return Matrices(layers, numbers, np.array(facts, np.int64).reshape(-1, len(_FACTS)), tuple(arrays))


class Packing(NamedTuple):
    """The layout of an adapter's matrices in one piece of memory; see `sgmv.cpu`.

    tasks: [M, COPY_TASK_WIDTH] int64; TO_A and TO_B count from the memory's beginning. num_bytes: the total. in_bf16:
    every source matrix has two bytes per value, and there is room for these only.
    """

    tasks: NDArray[np.int64]
    num_bytes: int
    in_bf16: bool

    def at(self, address: int) -> NDArray[np.int64]:
        """The copy tasks for memory that begins at this address."""
        tasks = self.tasks.copy()
        tasks[:, [TO_A, TO_B]] += address
        return tasks


def packing(source: Matrices) -> Packing:
    """Place all of a one after the other, then all of b. `source` must live until the last copy task is carried out.

    A matrix that several modules share (an a of gate and up) is stored once: each of them writes the same bytes.
    """
    tasks = np.zeros((len(source.facts), COPY_TASK_WIDTH), np.int64)
    tasks[:, _FACTS] = source.facts
    in_bf16 = bool((tasks[:, [A_SIZE, B_SIZE]] == 2).all())
    width = 2 if in_bf16 else 4
    num_a, tasks[:, TO_A] = _pack_offsets(tasks[:, A], _panels(tasks[:, RANK], LANES) * tasks[:, D_IN] * width)
    num_b, tasks[:, TO_B] = _pack_offsets(tasks[:, B], tasks[:, RANK] * _panels(tasks[:, D_OUT], PANEL) * width)
    tasks[:, TO_B] += num_a
    return Packing(tasks, num_a + num_b, in_bf16)


def _panels(sizes: NDArray[np.int64], panel: int) -> NDArray[np.int64]:
    """Sizes rounded up to whole panels."""
    return -(-sizes // panel) * panel


def _pack_offsets(sources: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
    """Total bytes of all matrices one after the other, and each one's offset."""
    _, first, same = np.unique(sources, return_index=True, return_inverse=True)
    assert (sizes == sizes[first][same]).all(), "matrices at one address are one matrix"
    ends = np.cumsum(sizes[first])
    return int(sizes[first].sum()), (ends - sizes[first])[same]


def _address(array: NDArray[Any]) -> int:
    where: int = array.__array_interface__["data"][0]  # a third of the time of array.ctypes.data
    return where
