"""The warm process that forks readers, and what a reader does: its whole life is one adapter.

In: requests for readers, and in each the task. Out: JSON on the reader's socket, and values in memory that the server
sized. What runs here before a task arrives is ours; what comes after may be a stranger's doing, so the limits are set
in between. The server's side is `reading_process`.

`python -m app.engine.adapters.sandbox.reader_worker FD` is the warm process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.limits import TRANSIENT_ERRNOS, ReadLimits, reading_error
from app.engine.adapters.sandbox.packing import PackedAdapter, pack_adapter
from app.engine.errors import AdapterError, AdapterFormatError, AdapterTooLarge
from app.engine.models.spec import ModelSpec
from app.kernels.machine.prefault import prefault_pages

_RECEIVE_BYTES = 1 << 16
#: A request for a reader says how many bytes it should have at hand.
_REQUEST = struct.Struct("<Q")
#: Of the warm process and its readers: they work beside engines, whose every step somebody waits for.
NICENESS = 10
#: Pages are had ahead after this long: not while the processors put to use what was read just before.
_AHEAD_AFTER_S = 0.25


@dataclass(frozen=True, slots=True)
class ReaderTask:
    """One adapter to read. `supported_features` is `build_adapter`'s."""

    path: Path
    spec: ModelSpec
    limits: ReadLimits
    supported_features: frozenset[str]
    memory_bytes: int
    seconds: float


def pack_request(ahead_bytes: int) -> bytes:
    """What the warm process is sent for a reader, along with its socket and the memory it answers in."""
    return _REQUEST.pack(ahead_bytes)


def serve(control: socket.socket) -> None:
    """Fork once per message until the server hangs up."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the readers
    gc.freeze()  # what is loaded now stays shared with every reader
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
        if not question:  # the server has ended, or has no use for this reader
            return
        task: ReaderTask = pickle.loads(question)  # written by our own server
        _limit_this_process(task.memory_bytes, task.seconds)
        verdict, _memory = _read_and_pack(task, shared)  # held: it takes time to free, and somebody waits
        with contextlib.suppress(BrokenPipeError):  # the server has stopped waiting
            stream.sendall(json.dumps(verdict).encode())
            stream.shutdown(socket.SHUT_RDWR)


def _map(shared: int, num_bytes: int) -> NDArray[np.uint8]:
    """The memory that the server sized, from its front on."""
    return np.frombuffer(mmap.mmap(shared, num_bytes), np.uint8)


def _read_and_pack(task: ReaderTask, shared: int) -> tuple[dict[str, Any], tuple[LoraAdapter, PackedAdapter] | None]:
    """The answer, and what it was made of."""

    def allocate(num_bytes: int) -> NDArray[np.uint8]:
        if num_bytes > task.memory_bytes:
            raise MemoryError
        if not num_bytes:
            return np.empty(0, np.uint8)
        memory = _map(shared, num_bytes)
        prefault_pages(memory)
        return memory

    try:
        adapter = read_adapter(task.path, task.spec, task.limits, task.supported_features)
        packed = pack_adapter(adapter, allocate)
    except AdapterError as error:
        return {"error": type(error).__name__, "message": str(error)}, None
    except MemoryError:
        message = f"reading '{task.path.name}' needs more than {task.memory_bytes} bytes of memory"
        return {"error": AdapterTooLarge.__name__, "message": message}, None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            found = reading_error(task.path, error)
            return {"error": type(found).__name__, "message": str(found)}, None
        # A bug in a reader is this adapter's end and nobody else's. It has no right to write: we log the trace.
        message = f"reading '{task.path.name}' failed: {type(error).__name__}: {str(error)[:200]}"
        return {"error": AdapterFormatError.__name__, "message": message, "trace": traceback.format_exc()}, None
    return {"header": packed.header, "num_bytes": packed.arrays[0].nbytes}, (adapter, packed)


def _limit_this_process(memory_bytes: int, seconds: float) -> None:
    """From here on a request for more is refused by the kernel, or ends this process."""
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
    # Under the module's own name, by which pickled tasks ask for it: or every reader would import it once more.
    from app.engine.adapters.sandbox.reader_worker import serve

    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control)
