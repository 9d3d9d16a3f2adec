"""Compiled CPU kernels as custom calls of XLA programs (XLA's typed foreign function interface, C API 0.3).

In: a `KernelCall`: classes that name what a call is given and what it returns, and a compiled body that reads both by
name. Out: a call for use in JAX programs. Operands are read and results written where XLA keeps them; nothing is copied
but numbers. A call runs on the thread that runs the program and on the helpers of the step it belongs to (`Helpers`),
phase by phase as in `app.kernels.machine.team`: a helper that comes late finds its pieces taken and touches nothing but
the call's own record, which nobody reuses before the helper has left it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import jax
import numba
import numpy as np
from jax import Array
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from app.kernels.machine.compiled import compiled
from app.kernels.machine.team import Team, _add, _load, _offer_core, _pause

# -- what a call is given and returns ------------------------------------------------------------------


class _Kind(NamedTuple):
    """A value of a call: its Numba type and number of axes. Without axes it is a number, which is copied."""

    dtype: Any
    ndim: int


#: Annotations of the fields of operands and results.
Number = Annotated[Array, _Kind(types.int32, 0)]
Real = Annotated[Array, _Kind(types.float32, 0)]
Ints1 = Annotated[Array, _Kind(types.int32, 1)]
Ints2 = Annotated[Array, _Kind(types.int32, 2)]
Ints3 = Annotated[Array, _Kind(types.int32, 3)]
Floats1 = Annotated[Array, _Kind(types.float32, 1)]
Floats2 = Annotated[Array, _Kind(types.float32, 2)]
Floats3 = Annotated[Array, _Kind(types.float32, 3)]
Floats4 = Annotated[Array, _Kind(types.float32, 4)]
Floats5 = Annotated[Array, _Kind(types.float32, 5)]
Bytes4 = Annotated[Array, _Kind(types.uint8, 4)]

#: Phases a body may have, axes of an array, and arrays and numbers of a call.
MAX_PHASES, MAX_AXES, MAX_VALUES = 4, 5, 32


class KernelCall:
    """A kernel as a call: `call(operands, results)` inside a JAX program returns the results.

    operands, results: NamedTuple classes, their fields annotated as above. body: a `task` that reads them with
    `reader(operands)` and `reader(results, after=operands)`. in_place: result -> the operand whose memory it takes.
    """

    def __init__(self, name: str, operands: Any, results: Any, body: Any, in_place: Mapping[str, str]) -> None:
        self._name, self._operands, self._results, self._body = f"polylora_{name}", operands, results, body
        assert len(operands._fields) + len(results._fields) <= MAX_VALUES
        self._aliases = {operands._fields.index(given): results._fields.index(to) for to, given in in_place.items()}

    def __call__(self, operands: Any, shapes: tuple[tuple[int, ...], ...]) -> Any:
        """operands: one of the operands' class. shapes: of the results, which are float32."""
        assert type(operands) is self._operands
        target, _ = self._registered
        described = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        call = jax.ffi.ffi_call(target, described, input_output_aliases=self._aliases)
        return self._results(*call(*operands))

    @cached_property
    def _registered(self) -> tuple[str, Any]:
        """The target's name, and what must live as long as programs may call it."""
        task = numba.cfunc(types.void(types.intp), nopython=True, cache=True)(self._body)
        handler = _handler(task.address)
        jax.ffi.register_ffi_target(self._name, jax.ffi.pycapsule(handler.address), platform="cpu")
        return self._name, (task, handler)


def reader(kind: Any, after: Any = None) -> Any:
    """A compiled function: the address of a call's record -> its operands, or its results after the operands."""
    kinds = [get_args(hint)[1] for hint in get_type_hints(kind, include_extras=True).values()]
    loaders = [_loader(each) for each in kinds]
    found = types.NamedTuple([_type_of(each) for each in kinds], kind)
    first = 0 if after is None else len(after._fields)

    @intrinsic
    def read(typingctx: Any, record: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = []
            for index, (load, item) in enumerate(zip(loaders, found.types, strict=True)):
                at = builder.add(args[0], ir.Constant(ir.IntType(64), _VALUES + (first + index) * _VALUE_BYTES))
                values.append(context.compile_internal(builder, load, item(types.intp), [at]))
            return context.make_tuple(builder, signature.return_type, values)

        return found(types.intp), codegen

    return read


def _type_of(kind: _Kind) -> Any:
    return types.Array(kind.dtype, kind.ndim, "C") if kind.ndim else kind.dtype


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_data_type(kind).as_pointer())

        return types.CPointer(kind)(types.intp), codegen

    return pointer


_words, _ints = _pointer_to(types.int64), _pointer_to(types.int32)


def _loader(kind: _Kind) -> Any:
    """What reads one value of a record: an address or a number, then the lengths of its axes."""
    pointer, ndim = _pointer_to(kind.dtype), kind.ndim
    if ndim == 0:
        return lambda at: carray(pointer(at), 1)[0]
    return lambda at: carray(pointer(carray(_words(at), 1)[0]), to_fixed_tuple(carray(_words(at), 1 + ndim)[1:], ndim))


# -- XLA's structs, as in xla/ffi/api/c_api.h, which a test reads again for the jaxlib that is installed ----

_HEADER = [("struct_size", "i8"), ("extension_start", "i8")]
ARGS = np.dtype([*_HEADER, ("size", "i8"), ("types", "i8"), ("args", "i8")], align=True)
RETS = np.dtype([*_HEADER, ("size", "i8"), ("types", "i8"), ("rets", "i8")], align=True)
CALL_FRAME = np.dtype(
    [*_HEADER, ("api", "i8"), ("ctx", "i8"), ("stage", "i4"), ("args", ARGS), ("rets", RETS)], align=True
)
BUFFER = np.dtype([*_HEADER, ("dtype", "i4"), ("data", "i8"), ("rank", "i8"), ("dims", "i8")], align=True)
EXTENSION = np.dtype([("struct_size", "i8"), ("type", "i4"), ("next", "i8"), ("metadata", "i8")], align=True)
API_VERSION = np.dtype([*_HEADER, ("major_version", "i4"), ("minor_version", "i4")], align=True)
METADATA = np.dtype([("struct_size", "i8"), ("api_version", API_VERSION)], align=True)
VERSION = (0, 3)
_MAJOR, _MINOR = VERSION
#: The type of the extension by which XLA asks, once, which version of the interface a handler speaks.
_ASKS_METADATA = 1

_frame_at, _buffer_at, _extension_at, _metadata_at = (
    _pointer_to(numba.from_dtype(struct)) for struct in (CALL_FRAME, BUFFER, EXTENSION, METADATA)
)


@compiled
def _answers_metadata(frame):
    """Answer XLA's question if this is it; False for a call."""
    start = carray(_frame_at(frame), 1)[0].extension_start
    if start == 0:
        return False
    extension = carray(_extension_at(start), 1)[0]
    if extension.type != _ASKS_METADATA:
        return False
    version = carray(_metadata_at(extension.metadata), 1)[0].api_version
    version.major_version = _MAJOR
    version.minor_version = _MINOR
    return True


# -- records of calls, and the board on which a call asks for help -------------------------------------

#: Bytes of a record: who holds it, which call it is, its task, the team's counters, then its values.
_HOLDERS, _NUMBER, _TASK, _TEAM = 0, 8, 16, 64
_VALUES, _VALUE_BYTES = _TEAM + MAX_PHASES * 128, (1 + MAX_AXES) * 8
_RECORD_BYTES = -(-(_VALUES + MAX_VALUES * _VALUE_BYTES) // 64) * 64
#: The board: the record of the call that wants help, or 0; how many steps are running; then the records.
_WANTED, _NUM_STEPS, _RECORDS, _NUM_RECORDS = 0, 64, 128, 64
#: Looks at the board before the processor is offered to others.
_SPINS = 400

_MEMORY = np.zeros((_RECORDS + _NUM_RECORDS * _RECORD_BYTES) // 8 + 8, np.int64)
#: Aligned to a line; never freed: a helper may still look at it while Python is ending.
BOARD = -(-_MEMORY.ctypes.data // 64) * 64
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_MEMORY))


def _handler(task: int) -> Any:
    """What XLA calls for the task at an address."""
    board = BOARD

    @numba.cfunc(types.intp(types.intp), nopython=True)
    def handle(frame: int) -> int:
        if _answers_metadata(frame):
            return 0
        record = _open_record(board, frame, task)
        asks = _exchange(board + _WANTED, 0, record)
        _call(task, record)
        if asks:
            _exchange(board + _WANTED, record, 0)
        _add(record + _HOLDERS, -1)
        return 0

    return handle


@compiled
def team_of(record):
    """The call's counters, as `app.kernels.machine.team` has them."""
    return carray(_words(record + _TEAM), (MAX_PHASES, 16))


@compiled
def _open_record(board, frame, task):
    """A record that nobody holds, with one holder and all that is to be known of the call."""
    index = 0
    record = board + _RECORDS
    while not _exchange(record + _HOLDERS, 0, 1):
        index = (index + 1) % _NUM_RECORDS
        record = board + _RECORDS + index * _RECORD_BYTES
        if index == 0:
            _offer_core()
    words = carray(_words(record), _VALUES // 8)
    words[_NUMBER // 8] += 1
    words[_TASK // 8] = task
    words[_TEAM // 8 :] = 0
    call = carray(_frame_at(frame), 1)[0]
    num_operands, num_results = call.args.size, call.rets.size
    operands, results = carray(_words(call.args.args), num_operands), carray(_words(call.rets.rets), num_results)
    at = record + _VALUES
    for b in range(num_operands + num_results):
        _describe(operands[b] if b < num_operands else results[b - num_operands], at)
        at += _VALUE_BYTES
    return record


@compiled
def _describe(buffer, at):
    """Write a buffer's address and lengths, or the number that it holds, to a value of a record."""
    described = carray(_buffer_at(buffer), 1)[0]
    rank = described.rank
    words = carray(_words(at), 1 + MAX_AXES)
    if rank == 0:
        carray(_ints(at), 1)[0] = carray(_ints(described.data), 1)[0]
    else:
        words[0] = described.data
        dims = carray(_words(described.dims), rank)
        for axis in range(rank):
            words[1 + axis] = dims[axis]


@compiled
def _help(board):
    """Take part in the calls on the board until no step is running."""
    looks, last, last_number = 0, 0, 0
    while _load(board + _NUM_STEPS) > 0:
        record = _load(board + _WANTED)
        if record != 0:
            _add(record + _HOLDERS, 1)
            number = _load(record + _NUMBER)
            if _load(board + _WANTED) == record and (record != last or number != last_number):
                _call(_load(record + _TASK), record)
                last, last_number, looks = record, number, 0
            _add(record + _HOLDERS, -1)
        looks += 1
        if looks < _SPINS:
            _pause()
        else:
            _offer_core()


@compiled
def _count_steps(board, change):
    _add(board + _NUM_STEPS, change)


class Helpers:
    """Threads that take part in the calls of a step while it runs, and sleep between steps."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: the one that runs the program included."""
        self._team = Team(num_threads)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, from before its program is called until its results are there."""
        _count_steps(BOARD, 1)
        try:
            self._team.lend(_help, BOARD)
            yield
        finally:
            _count_steps(BOARD, -1)

    def close(self) -> None:
        """End the threads."""
        self._team.close()


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
    """Call the C function at an address with one number."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen
