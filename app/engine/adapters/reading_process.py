"""A process that may die reads adapters for us.

In: a path and what may be spent on it. Out: a `PackedAdapter` in shared memory, or the `AdapterError` that
says why not. One warm process (no torch, no Ray, one thread) is forked once per adapter, so each adapter
meets a fresh process that has no threads, little memory, little time and no right to write, and costs
milliseconds instead of a start of Python. What comes back is JSON and float32 values in memory whose size we
set: this process never parses a stranger's bytes. A warm process that died is replaced.

`python -m app.engine.adapters.reading_process FD` is the warm process.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import mmap
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine import errors
from app.engine.adapters.limits import MIB, ReadLimits
from app.engine.adapters.packing import PackedAdapter, pack_adapter
from app.engine.adapters.reading import read_adapter
from app.engine.errors import AdapterError, AdapterFormatError, AdapterReadFailed, AdapterTooLarge, EngineFailure
from app.engine.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_PROJECT = Path(__file__).parents[3]
_RECEIVE_BYTES = 1 << 16
#: Header and message of one adapter: 100,000 modules of 200 characters, and then some.
_MAX_VERDICT_BYTES = 64 * MIB
#: Linux 5.14; Python's `mmap` does not name it.
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What reading may use for an adapter of s bytes: `base + per_byte * s` memory and `base_s + s / rate` time.

    Reading needs up to six times an adapter's size: its bytes, and both matrices in float32, twice.
    """

    base_memory_bytes: int = 1024 * MIB
    memory_per_byte: int = 8
    base_s: float = 20.0
    bytes_per_s: float = 20.0 * MIB

    def memory_bytes(self, size: int) -> int:
        return self.base_memory_bytes + self.memory_per_byte * size

    def seconds(self, size: int) -> float:
        return self.base_s + size / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class ReadingTask:
    """One adapter to read. `served` is `build_adapter`'s."""

    path: Path
    spec: ModelSpec
    limits: ReadLimits
    served: frozenset[str]
    memory_bytes: int
    seconds: float


class ReadingProcess:
    """The warm process. Called from any thread; adapters are read side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_starts = 0
        self._control, self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, task: ReadingTask) -> PackedAdapter:
        """Raises the `AdapterError` that reading met; EngineFailure if no process stays alive."""
        for _ in range(2):
            control = self._control
            found = self._read(task, control)
            if found is not None:
                return found
            with self._lock:
                if self._control is control:
                    self._stop()
                    self._control, self._process = self._start()
        raise EngineFailure("the process that reads adapters does not stay alive; the store's log may say why")

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _read(self, task: ReadingTask, control: socket.socket) -> PackedAdapter | None:
        """None if the warm process is gone: nothing has been learned about the adapter."""
        deadline_s = time.monotonic() + task.seconds
        ours, theirs = socket.socketpair()
        shared = _shared_file(task.memory_bytes)
        try:
            with ours:
                with theirs:
                    try:
                        socket.send_fds(control, [b"r"], [theirs.fileno(), shared])
                    except OSError:
                        return None
                text = _converse(ours, pickle.dumps(task), deadline_s, task)
            if not text and _has_hung_up(control):
                return None
            return PackedAdapter(*_verdict(text, shared, task))
        finally:
            os.close(shared)

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        self.num_starts += 1
        ours, theirs = socket.socketpair()
        environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(_PROJECT), "OMP_NUM_THREADS": "1"}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        # A fork touches all of its memory for the first time, which takes 3 us per page (AMD EPYC, a virtual machine):
        # in huge pages, where the system gives them, 10 MB of bfloat16 are read in 29 ms instead of 41.
        environment |= {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        command = [sys.executable, "-m", "app.engine.adapters.reading_process", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
            )
        return ours, process

    def _stop(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


def _shared_file(size_bytes: int) -> int:
    """A descriptor of memory without a name; its size is fixed where the system can fix it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return descriptor
    with tempfile.TemporaryFile() as file:
        file.truncate(size_bytes)
        return os.dup(file.fileno())


def _converse(stream: socket.socket, question: bytes, deadline_s: float, task: ReadingTask) -> bytes:
    """Send the question, return everything that is answered in time. AdapterReadFailed when the time is up."""
    answer = bytearray()
    try:
        stream.settimeout(_left_s(deadline_s))
        stream.sendall(question)
        stream.shutdown(socket.SHUT_WR)
        while True:
            stream.settimeout(_left_s(deadline_s))
            received = stream.recv(_RECEIVE_BYTES)
            answer += received
            if not received or len(answer) > _MAX_VERDICT_BYTES:
                return bytes(answer)
    except TimeoutError:
        # The reader's own alarm ends it a second from now.
        raise AdapterReadFailed(
            f"'{task.path.name}' was not read within {task.seconds:.3g} s; reading was stopped"
        ) from None
    except OSError:  # it went away while it was spoken to
        return b""


def _left_s(deadline_s: float) -> float:
    """Raises TimeoutError when there is none: an answer that has come too late is not read."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _verdict(text: bytes, shared: int, task: ReadingTask) -> tuple[dict[str, Any], list[NDArray[np.float32]]]:
    try:
        verdict = json.loads(text)
    except ValueError:
        raise AdapterReadFailed(
            f"reading '{task.path.name}' ended its process without a verdict: a crash, or no memory left"
        ) from None
    if "trace" in verdict:
        logger.error("an adapter reader met a bug; please report it\n%s", verdict["trace"])
    if "header" not in verdict:
        found = getattr(errors, verdict["error"], None)
        kind = found if isinstance(found, type) and issubclass(found, AdapterError) else AdapterFormatError
        raise kind(verdict["message"])
    size = int(verdict["num_values"])
    if not 0 <= 4 * size <= task.memory_bytes:
        raise AdapterReadFailed(f"reading '{task.path.name}' gave {size} values; that cannot be")
    if not size:
        return verdict["header"], [np.empty(0, np.float32)]
    mapped = mmap.mmap(shared, 4 * size, prot=mmap.PROT_READ)
    return verdict["header"], [np.frombuffer(mapped, np.float32)]


def _has_hung_up(control: socket.socket) -> bool:
    """Nothing is ever said on it; what can be read is its end."""
    try:
        return control.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


# -- the other side -------------------------------------------------------------------------------------


def _serve(control: socket.socket) -> None:
    """Fork once per message until the server hangs up."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the readers
    gc.freeze()  # what is loaded now stays shared with every reader
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        if len(descriptors) == 2 and os.fork() == 0:
            control.close()
            _read_one(*descriptors)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _read_one(stream_descriptor: int, shared: int) -> None:
    with socket.socket(fileno=stream_descriptor) as stream:
        question = bytearray()
        while received := stream.recv(_RECEIVE_BYTES):
            question += received
        task: ReadingTask = pickle.loads(question)  # written by our own server
        _limit_this_process(task.memory_bytes, task.seconds)
        with contextlib.suppress(BrokenPipeError):  # the server has stopped waiting
            stream.sendall(json.dumps(_read_and_pack(task, shared)).encode())


def _read_and_pack(task: ReadingTask, shared: int) -> dict[str, Any]:
    num_values = 0

    def allocate(count: int) -> NDArray[np.float32]:
        nonlocal num_values
        num_values = count
        if 4 * count > task.memory_bytes:
            raise MemoryError
        if not count:
            return np.empty(0, np.float32)
        mapped = mmap.mmap(shared, 4 * count)
        with contextlib.suppress(OSError):  # an older kernel gives pages one by one, as they are written to
            mapped.madvise(_MADV_POPULATE_WRITE)
        return np.frombuffer(mapped, np.float32)

    try:
        adapter = read_adapter(task.path, task.spec, task.limits, task.served)
        header, _ = pack_adapter(adapter, allocate)
    except AdapterError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except MemoryError:
        message = f"reading '{task.path.name}' needs more than {task.memory_bytes} bytes of memory"
        return {"error": AdapterTooLarge.__name__, "message": message}
    except Exception as error:
        # A bug in a reader is this adapter's end and nobody else's. It has no right to write: we log the trace.
        message = f"reading '{task.path.name}' failed: {type(error).__name__}: {str(error)[:200]}"
        return {"error": AdapterFormatError.__name__, "message": message, "trace": traceback.format_exc()}
    return {"header": header, "num_values": num_values}


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
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _serve(control)
