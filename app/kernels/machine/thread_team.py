"""A thread team: threads that share one compiled call, phase by phase, without waiting for late ones.

A phase is a number of independent pieces. Every thread runs the whole call: it claims pieces of the phase until none is
left, waits until all are done, and goes on. Threads synchronise nowhere else: one that was not scheduled in time finds
its pieces done, and a call is correct with any number of threads that arrive. So a core that another program uses costs
its part of the speed, not a wait at every step.

The compiled functions take `(team, phase)` as first arguments and return the next phase. `team` is an array [phases,
16] of int64, zero at first: claimed pieces at 0, done pieces at 8, apart by a cache line. Kernels must obey two rules:
which thread computes a piece must not change its bits, and the number of pieces may depend only on what never changes
after the call, shapes above all, because a thread may still be counting them when the caller has long returned.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from app.kernels.machine.jit import jit

_Calls = queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None]

#: Checks of a phase's end before the thread yields its processor.
_SPINS = 400
_TAKEN, _DONE = 0, 8
#: Items at the end of a phase that come in smaller and smaller pieces, so that threads finish together.
TAIL = 8


@intrinsic
def _add(typingctx: Any, address: Any, value: Any) -> Any:
    """Atomically add to the int64 at `address`; returns the old value. Earlier writes are visible to `_load`."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    """Atomically read the int64 at `address`."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.intp), codegen


@intrinsic
def _pause(typingctx: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if llvmlite.binding.get_process_triple().startswith(("x86_64", "i686")):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _offer_core(typingctx: Any) -> Any:
    """sched_yield(2): other threads that want this core run first."""

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@jit
def claim_piece(team, phase):
    """Claim the next piece of this phase, counted from 0; a number past the last piece means that none is left."""
    return _add(team.ctypes.data + (phase * 16 + _TAKEN) * 8, 1)


@jit
def finish_phase(team, phase, num_pieces, num_done):
    """Report this thread's finished pieces and wait until all are done. Returns the next phase."""
    report_pieces(team, phase, num_done)
    await_pieces(team, phase, num_pieces)
    return phase + 1


@jit
def report_pieces(team, phase, num_done):
    """Report this thread's finished pieces. What reads the results of the phase calls `await_pieces` first."""
    if num_done > 0:
        _add(team.ctypes.data + (phase * 16 + _DONE) * 8, num_done)


@jit
def await_pieces(team, phase, num_pieces):
    """Wait until all pieces of this phase are done."""
    at, spins = team.ctypes.data + (phase * 16 + _DONE) * 8, 0
    while _load(at) < num_pieces:
        if spins < _SPINS:
            spins += 1
            _pause()
        else:
            _offer_core()


@jit
def count_pieces(num_items, size):
    """Number of pieces: those of `size` items, followed by smaller and smaller ones; see `piece`."""
    count = max(num_items - TAIL, 0) // size
    left = num_items - count * size
    while left > 0:
        left -= _tail_piece(left, size)
        count += 1
    return count


@jit
def piece(index, num_items, size):
    """(first, end) of the items of one piece."""
    large = max(num_items - TAIL, 0) // size
    first, end = 0, min(index, large) * size
    for _ in range(large, index + 1):
        first, end = end, end + _tail_piece(num_items - end, size)
    return (first, end) if index >= large else (end, end + size)


@jit
def _tail_piece(left, size):
    """Size of the next piece among a phase's last items: two threads finish within a single item."""
    return max(min(left // 3, size), 1)


class ThreadTeam:
    """`num_threads` threads: the caller's, and helpers that sleep between calls. Close it after use."""

    def __init__(self, num_threads: int) -> None:
        """Raises ValueError for fewer than one thread."""
        if num_threads < 1:
            raise ValueError(f"a team has {num_threads} threads; it needs at least 1")
        self._calls: _Calls = queue.SimpleQueue()
        self._helpers = [
            threading.Thread(target=_help, args=(self._calls,), name=f"kernels-{index}", daemon=True)
            for index in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()
        self._end = weakref.finalize(self, _dismiss, self._calls, num_threads - 1)

    @property
    def num_threads(self) -> int:
        return len(self._helpers) + 1

    def run(self, function: Callable[..., Any], num_phases: int, *args: Any) -> None:
        """Call function(team, 0, *args), which has at most `num_phases` phases, on every thread.

        Returns when all its work is done. A helper may still be in an old call: it finds every piece claimed and
        touches nothing. Raises RuntimeError if a helper has died.
        """
        team: NDArray[np.int64] = np.zeros((num_phases, 16), np.int64)
        for helper in self._helpers:
            if not helper.is_alive():
                raise RuntimeError(f"thread {helper.name} has ended; its traceback is on standard error")
            self._calls.put((function, (team, 0, *args)))
        function(team, 0, *args)

    def close(self) -> None:
        """Stop the helpers. The team must not be used afterwards."""
        self._end()
        for helper in self._helpers:
            helper.join()


def _help(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        function, args = call
        function(*args)
        del call, function, args  # a sleeping helper must not keep arrays alive


def _dismiss(calls: _Calls, num_helpers: int) -> None:
    for _ in range(num_helpers):
        calls.put(None)
