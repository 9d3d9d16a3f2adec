"""The child side of `reader_process`: the warm process that forks readers, and a reader, which lives for one adapter.

A reader gets its task as JSON on its socket, and answers there with JSON and with values in memory that the server
sized. Code before a task is trusted; what runs after it may be under a file's influence, so the limits are set in
between: then it can open the adapter's files only, so all modules must be loaded before.

`python -m app.engine.adapters.sandbox.reader_worker FD` is the warm process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.bounded_files import TRANSIENT_ERRNOS, ReadLimits, reading_error
from app.engine.adapters.combining.combination import Combination
from app.engine.adapters.combining.combine import combine
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.sandbox.confinement import confine_process
from app.engine.adapters.sandbox.packing import PackedAdapter, pack_adapter, unpack_adapter
from app.engine.errors import AdapterError, AdapterFormatError, AdapterTooLarge
from app.engine.models.chat.chat_template import load_lazy_modules
from app.engine.models.spec import ModelSpec
from app.engine.wire_format import from_plain, to_plain
from app.kernels.machine.prefault import prefault_pages

_RECEIVE_BYTES = 1 << 16
#: A fork request: how many bytes the reader should prepare.
_REQUEST = struct.Struct("<Q")
#: Readers run at low priority, because the engines on the same machine have requests waiting on every step.
NICENESS = 10
#: Delay before pages are prefaulted, so that the processors first use the adapter that was just read.
_AHEAD_AFTER_S = 0.25


@dataclass(frozen=True, slots=True)
class ReaderTask:
    """One adapter to read. supported_features: see `build_adapter`."""

    path: Path
    spec: ModelSpec
    limits: ReadLimits
    supported_features: frozenset[str]
    memory_bytes: int
    seconds: float

    @property
    def name(self) -> str:
        """For messages."""
        return self.path.name


@dataclass(frozen=True, slots=True)
class CombineTask:
    """A combination to make. `headers` and `nums_bytes`: of its packed parts, which are in the memory that the server
    shares, one after another, from `inputs_start` on.
    """

    combination: Combination
    spec: ModelSpec
    headers: Sequence[Mapping[str, Any]]
    nums_bytes: Sequence[int]
    memory_bytes: int
    seconds: float

    @property
    def name(self) -> str:
        """For messages."""
        return self.combination.name

    @property
    def inputs_start(self) -> int:
        """Where the parts begin: after the result's memory, on a page of its own."""
        return -(-self.memory_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

    def combine(self, shared: int) -> LoraAdapter:
        """Raises CombinationError."""
        parts = memoryview(mmap.mmap(shared, sum(self.nums_bytes), offset=self.inputs_start))
        adapters, start = [], 0
        for header, num_bytes in zip(self.headers, self.nums_bytes, strict=True):
            adapters.append(unpack_adapter(header, [np.frombuffer(parts[start : start + num_bytes], np.uint8)]))
            start += num_bytes
        return combine(self.combination, adapters, self.spec)


def pack_request(ahead_bytes: int) -> bytes:
    """The fork request, sent with the reader's socket and the memory it answers in."""
    return _REQUEST.pack(ahead_bytes)


def pack_task(task: ReaderTask | CombineTask) -> bytes:
    """What a reader gets on its socket."""
    return json.dumps([isinstance(task, CombineTask), to_plain(task)]).encode()


def parse_task(question: bytes | bytearray) -> ReaderTask | CombineTask:
    """The opposite of `pack_task`."""
    is_combination, fields = json.loads(question)
    task: ReaderTask | CombineTask = from_plain(CombineTask if is_combination else ReaderTask)(fields)
    return task


def serve(control: socket.socket) -> None:
    """Fork once per message until the server hangs up."""
    load_lazy_modules()
    importlib.import_module("numpy.random")  # for combinations; NumPy would load it at first use
    importlib.import_module("numpy.ma")  # for the set functions, such as np.setdiff1d: the same
    for kind in (ReaderTask, CombineTask):
        from_plain(kind)  # cached for every fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: the readers' exit status is not collected
    gc.freeze()  # loaded objects stay shared with every fork
    os.nice(NICENESS)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _REQUEST.size, 2)
        if not message:
            return
        if len(descriptors) == 2 and os.fork() == 0:
            control.close()
            _read_one(*descriptors, *_REQUEST.unpack(message))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _read_one(stream_descriptor: int, shared: int, ahead_bytes: int) -> None:
    with socket.socket(fileno=stream_descriptor) as stream:
        if ahead_bytes and not select.select([stream], [], [], _AHEAD_AFTER_S)[0]:
            prefault_pages(_map(shared, ahead_bytes))
        question = bytearray()
        while received := stream.recv(_RECEIVE_BYTES):
            question += received
        if not question:  # the server ended, or does not need this reader
            return
        task = parse_task(question)
        _limit_this_process(task.memory_bytes, task.seconds)
        confine_process([] if isinstance(task, CombineTask) else [task.path])
        verdict, _memory = _read_and_pack(task, shared)  # referenced until exit: freeing it would delay the answer
        with contextlib.suppress(BrokenPipeError):  # the server timed out
            stream.sendall(json.dumps(verdict).encode())
            stream.shutdown(socket.SHUT_RDWR)


def _map(shared: int, num_bytes: int) -> NDArray[np.uint8]:
    """The memory that the server sized, from its start."""
    return np.frombuffer(mmap.mmap(shared, num_bytes), np.uint8)


def _read_and_pack(
    task: ReaderTask | CombineTask, shared: int
) -> tuple[dict[str, Any], tuple[LoraAdapter, PackedAdapter] | None]:
    """The answer, and the objects it was made of."""

    def allocate(num_bytes: int) -> NDArray[np.uint8]:
        if num_bytes > task.memory_bytes:
            raise MemoryError
        if not num_bytes:
            return np.empty(0, np.uint8)
        memory = _map(shared, num_bytes)
        prefault_pages(memory)
        return memory

    try:
        if isinstance(task, CombineTask):
            adapter = task.combine(shared)
        else:
            adapter = read_adapter(task.path, task.spec, task.limits, task.supported_features)
        packed = pack_adapter(adapter, allocate)
    except AdapterError as error:
        return {"error": type(error).__name__, "message": str(error)}, None
    except MemoryError:
        message = f"reading '{task.name}' needs more than {task.memory_bytes} bytes of memory"
        return {"error": AdapterTooLarge.__name__, "message": message}, None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            found = reading_error(Path(task.name), error)
            return {"error": type(found).__name__, "message": str(found)}, None
        # A bug in a reader fails this adapter only. The reader may not write, so the server logs the trace.
        message = f"reading '{task.name}' failed: {type(error).__name__}: {str(error)[:200]}"
        return {"error": AdapterFormatError.__name__, "message": message, "trace": traceback.format_exc()}, None
    return {"header": packed.header, "num_bytes": packed.arrays[0].nbytes}, (adapter, packed)


def _limit_this_process(memory_bytes: int, seconds: float) -> None:
    """Set limits; the kernel refuses requests beyond them, or ends this process."""
    for what, bound in {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }.items():
        _, hard = resource.getrlimit(what)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)  # noqa: PLW2901
        resource.setrlimit(what, (bound, bound))
    signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control)
