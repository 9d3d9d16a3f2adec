"""Compiled CPU kernels as custom calls of XLA programs (XLA's typed foreign function interface, C API 0.3).

In: a kernel `body(team, args)` in Numba, wrapped in a `task`. Out: a target that `jax.ffi.ffi_call` names. The call
runs on the thread that runs the program and on the threads of XLA's own pool, phase by phase as in
`app.kernels.machine.team`: a helper that comes late finds its pieces taken and touches nothing but the call's own
record. A helper that has left a call lingers: the next call of a step comes within microseconds, and to wake a
sleeping thread for each takes longer than many of them do.

The first operand of every call is a vector of up to `NUM_SCALARS` int32; its values are copied, so a late helper may
read them. `args`: those scalars, then per buffer, operands before results, its address and up to five sizes:

    args[0 .. 15] scalars | args[16 + 6 b] address of buffer b | args[17 + 6 b ...] its sizes

Offsets are those of `xla/ffi/api/c_api.h`, which a test reads again for the jaxlib that is installed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numba
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from app.kernels.machine.compiled import compiled
from app.kernels.machine.team import _add, _load, _offer_core, _pause

NUM_SCALARS, _FIRST, _STRIDE = 16, 16, 6
#: Phases a body may have.
MAX_PHASES = 4
#: Words of a call's record: references; the arguments of scheduling a helper; its task and the places where helpers
#: linger; the arguments of asking for the number of threads; its length; the team's counters; args.
_SCHEDULE, _TASK, _PLACES, _NUM_THREADS, _LENGTH, _TEAM = 1, 6, 7, 8, 13, 16
_ARGS = _TEAM + 16 * MAX_PHASES
#: Byte offsets in XLA_FFI_CallFrame, XLA_FFI_Buffer, XLA_FFI_Metadata and XLA_FFI_Api.
FRAME = {
    "extension_start": 8,
    "api": 16,
    "ctx": 24,
    "args.size": 56,
    "args.args": 72,
    "rets.size": 96,
    "rets.rets": 112,
}
BUFFER = {"data": 24, "rank": 32, "dims": 40}
API = {"XLA_FFI_ThreadPool_Schedule": 136, "XLA_FFI_ThreadPool_NumThreads": 144}
VERSION = (0, 3)
_EXTENSION, _API, _CTX = FRAME["extension_start"], FRAME["api"], FRAME["ctx"]
_NUM_OPERANDS, _OPERANDS, _NUM_RESULTS, _RESULTS = (
    FRAME[name] for name in ("args.size", "args.args", "rets.size", "rets.rets")
)
_DATA, _RANK, _DIMS = BUFFER["data"], BUFFER["rank"], BUFFER["dims"]
_FN_SCHEDULE, _FN_NUM_THREADS = API["XLA_FFI_ThreadPool_Schedule"], API["XLA_FFI_ThreadPool_NumThreads"]
_MAJOR, _MINOR = VERSION
#: Helpers that may linger at once, each at a cache line of its own; what a place holds where nobody is and where a
#: helper waits, beside the record that it is handed.
_NUM_PLACES, _LINE = 64, 64
_NOBODY, _WAITS = 0, 1
#: Looks at its place before a helper goes back to sleep, and how many of them keep the core: some 0.1 ms in all.
_LOOKS, _SPINS = 600, 400


#: Decorates the C function of a call: `def run(record)`, which calls its body and then `leave_record`.
task = numba.cfunc(types.void(types.intp), nopython=True, cache=True)


def register(name: str, run: Any) -> Any:
    """Make `run`, a `task`, the target `name` on the CPU. Returns what must live as long as programs may call it."""
    address, places, helper = run.address, _places(), _helper()
    helper_address = helper.address

    @numba.cfunc(types.intp(types.intp), nopython=True)
    def handler(frame: int) -> int:
        if _describe(frame):
            return 0
        record = _new_record(frame, address, places)
        for _ in range(_num_helpers(frame, record)):
            _add(record, 1)
            if not _hand_over(places, record):
                _schedule(frame, record, helper_address)
        _call(address, record)
        return 0

    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler.address), platform="cpu")
    return run, handler, helper


@cache
def _places() -> int:
    """Address of the process's places, which are never freed: a helper may linger while Python is ending."""
    places: int = _new_places()
    return places


@cache
def _helper() -> Any:
    return task(_help)


def _address_of(kind: Any) -> Any:
    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_data_type(kind).as_pointer())

        return types.CPointer(kind)(types.intp), codegen

    return pointer


_to_words, _to_ints, _to_floats, _to_bools, _to_octets = (
    _address_of(kind) for kind in (types.int64, types.int32, types.float32, types.boolean, types.uint8)
)


@compiled
def floats(address, shape):
    """The float32 array at an address."""
    return carray(_to_floats(address), shape)


@compiled
def ints(address, shape):
    """The int32 array at an address."""
    return carray(_to_ints(address), shape)


@compiled
def bools(address, shape):
    """The array of truth values at an address, a byte each."""
    return carray(_to_bools(address), shape)


@compiled
def octets(address, shape):
    """The uint8 array at an address."""
    return carray(_to_octets(address), shape)


@compiled
def words(address, shape):
    """The int64 array at an address."""
    return carray(_to_words(address), shape)


@compiled
def buffer(args, b):
    """Address of buffer b."""
    return args[_FIRST + _STRIDE * b]


@compiled
def size(args, b, axis):
    """Length of an axis of buffer b."""
    return args[_FIRST + _STRIDE * b + 1 + axis]


@compiled
def _word(address):
    return carray(_to_words(address), 1)[0]


@compiled
def _describe(frame):
    """Answer XLA's question, asked once, which version of the interface this is; False if nothing was asked."""
    extension = _word(frame + _EXTENSION)
    if extension == 0 or carray(_to_ints(extension + 8), 1)[0] != 1:
        return False
    version = carray(_to_ints(_word(extension + 24) + 24), 2)
    version[0], version[1] = _MAJOR, _MINOR
    return True


@compiled
def _new_record(frame, task, places):
    """The call's own memory, with one reference: its counters, and all it needs to know of the call."""
    num_operands, num_results = _word(frame + _NUM_OPERANDS), _word(frame + _NUM_RESULTS)
    length = _ARGS + _FIRST + _STRIDE * (num_operands - 1 + num_results)
    record = _allocate(length * 8)
    words = carray(_to_words(record), length)
    words[:_ARGS] = 0
    words[0], words[_TASK], words[_PLACES], words[_LENGTH] = 1, task, places, length
    operands, results = _word(frame + _OPERANDS), _word(frame + _RESULTS)
    scalars = _word(operands)
    count = _word(_word(scalars + _DIMS))
    given = carray(_to_ints(_word(scalars + _DATA)), count)
    for i in range(min(count, _FIRST)):
        words[_ARGS + i] = given[i]
    for b in range(num_operands - 1 + num_results):
        if b < num_operands - 1:
            described = _word(operands + (b + 1) * 8)
        else:
            described = _word(results + (b - num_operands + 1) * 8)
        at = _ARGS + _FIRST + _STRIDE * b
        words[at] = _word(described + _DATA)
        for axis in range(min(_word(described + _RANK), _STRIDE - 1)):
            words[at + 1 + axis] = _word(_word(described + _DIMS) + axis * 8)
    return record


@compiled
def team_of(record):
    """The call's counters, as `app.kernels.machine.team` has them."""
    return carray(_to_words(record + _TEAM * 8), (MAX_PHASES, 16))


@compiled
def args_of(record):
    """The call's scalars and buffers; see the module."""
    return carray(_to_words(record + _ARGS * 8), _word(record + _LENGTH * 8) - _ARGS)


@compiled
def leave_record(record):
    """The last thread to leave frees the record."""
    if _add(record, -1) == 1:
        _free(record)


@compiled
def _num_helpers(frame, record):
    """Threads of XLA's pool beside this one; none if it has no pool."""
    words = carray(_to_words(record + _NUM_THREADS * 8), 5)
    words[0], words[1], words[2], words[3], words[4] = 32, 0, _word(frame + _CTX), record + (_NUM_THREADS + 4) * 8, 1
    if _call(_word(_word(frame + _API) + _FN_NUM_THREADS), record + _NUM_THREADS * 8) != 0:
        return 0
    return words[4] - 1


@compiled
def _schedule(frame, record, helper):
    words = carray(_to_words(record + _SCHEDULE * 8), 5)
    words[0], words[1], words[2], words[3], words[4] = 40, 0, _word(frame + _CTX), helper, record
    if _call(_word(_word(frame + _API) + _FN_SCHEDULE), record + _SCHEDULE * 8) != 0:
        _add(record, -1)


def _help(record: int) -> None:
    """What XLA's pool runs: this call, and those that are handed over while the thread lingers."""
    while record != 0:
        places = _word(record + _PLACES * 8)
        _call(_word(record + _TASK * 8), record)  # which may free it
        record = _linger(places)


@compiled
def _new_places():
    places = _allocate(_NUM_PLACES * _LINE)
    carray(_to_words(places), _NUM_PLACES * _LINE // 8)[:] = 0
    return places


@compiled
def _hand_over(places, record):
    """Give the call to a helper that lingers; False if there is none."""
    for n in range(_NUM_PLACES):
        place = places + n * _LINE
        if _load(place) == _WAITS and _exchange(place, _WAITS, record):
            return True
    return False


@compiled
def _linger(places):
    """Wait a moment for a call; 0 if none comes."""
    for n in range(_NUM_PLACES):
        place = places + n * _LINE
        if _load(place) == _NOBODY and _exchange(place, _NOBODY, _WAITS):
            looks = 0
            while looks < _LOOKS and _load(place) == _WAITS:
                if looks < _SPINS:
                    _pause()
                else:
                    _offer_core()
                looks += 1
            if _exchange(place, _WAITS, _NOBODY):
                return 0
            record = _load(place)
            _exchange(place, record, _NOBODY)
            return record
    return 0


@intrinsic
def _exchange(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Atomically replace `old` by `new` at an address; whether `old` was there."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        found = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return types.boolean(types.intp, types.int64, types.int64), codegen


@intrinsic
def _call(typingctx: Any, function: Any, argument: Any) -> Any:
    """Call the C function at an address with one pointer; returns a pointer."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.intp(types.intp, types.intp), codegen


def _libc(name: str, result: Any, signature: Any) -> Any:
    @intrinsic
    def call(typingctx: Any, argument: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [ir.IntType(64)]), name)
            value = builder.call(function, args)
            return context.get_dummy_value() if signature.return_type == types.void else value

        return signature, codegen

    return call


_allocate = _libc("malloc", ir.IntType(64), types.intp(types.intp))
_free = _libc("free", ir.VoidType(), types.void(types.intp))
