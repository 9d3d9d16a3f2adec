"""Reads adapters in sandboxed child processes.

One warm process (no torch, no Ray, one thread) forks once per adapter, in milliseconds instead of a Python start. So
each adapter is read by a fresh process with bounded memory and time, which can open no other file, no connection and no
program (`confinement`). One reader is forked ahead, with as much memory as the last adapter needed. Results come back
as JSON and as numbers in memory whose size this process sets: it never parses an adapter's bytes. A warm process that
died is replaced.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.engine import errors
from app.engine.adapters.bounded_files import MIB
from app.engine.adapters.sandbox.confinement import confinement_gaps
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.adapters.sandbox.reader_worker import CombineTask, ReaderTask, pack_request, pack_task
from app.engine.errors import AdapterError, AdapterFormatError, AdapterReadFailed, EngineFailure

logger = logging.getLogger(__name__)

_PROJECT = Path(__file__).parents[4]
_RECEIVE_BYTES = 1 << 16
#: Bound on an answer: the header of 100,000 modules of 200 characters, with room to spare.
_MAX_VERDICT_BYTES = 64 * MIB
#: Most memory that a preforked reader prepares.
_MAX_AHEAD_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """Limits for reading an adapter of s bytes: `base + per_byte * s` of memory and `base_s + s / rate` of time.

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


class _Reader(NamedTuple):
    """A fork that waits for its task at the other end of `stream`; it answers in the memory of descriptor `shared`."""

    stream: socket.socket
    shared: int

    def close(self) -> None:
        self.stream.close()
        os.close(self.shared)


class ReaderProcess:
    """The warm process. Thread-safe; adapters are read in parallel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_starts = 0
        self._preforked: _Reader | None = None
        for gap in confinement_gaps():
            logger.warning("a process that reads adapters %s", gap)
        self._control, self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, task: ReaderTask | CombineTask, parts: Sequence[NDArray[np.uint8]] = ()) -> PackedAdapter:
        """The adapter that was read, or combined from `parts`. Raises the AdapterError met; EngineFailure if no process
        stays alive."""
        for _ in range(3):  # the preforked reader may be dead, then the warm process
            control = self._control
            reader = self._take_preforked() or _fork_reader(control, 0)
            found = None if reader is None else self._read(task, parts, reader, control)
            if found is not None:
                return found
            with self._lock:
                if self._control is control and _has_hung_up(control):
                    self._stop()
                    self._control, self._process = self._start()
        raise EngineFailure("the process that reads adapters does not stay alive; the store's log may say why")

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _read(
        self,
        task: ReaderTask | CombineTask,
        parts: Sequence[NDArray[np.uint8]],
        reader: _Reader,
        control: socket.socket,
    ) -> PackedAdapter | None:
        """None if the reader died before it had the task, or its warm process died: try again."""
        deadline_s = time.monotonic() + task.seconds
        try:
            if isinstance(task, CombineTask):
                _fix_size(reader.shared, task.inputs_start + sum(task.nums_bytes))
                _write(reader.shared, task.inputs_start, parts)
            else:
                _fix_size(reader.shared, task.memory_bytes)
            text = _exchange(reader.stream, pack_task(task), deadline_s, task)
            if text is None or (not text and _has_hung_up(control)):
                return None
            packed = PackedAdapter(*_parse_verdict(text, reader.shared, task))
            self._prefork_reader(sum(array.nbytes for array in packed.arrays))
            return packed
        finally:
            reader.close()

    def _take_preforked(self) -> _Reader | None:
        with self._lock:
            reader, self._preforked = self._preforked, None
        return reader

    def _prefork_reader(self, size_bytes: int) -> None:
        with self._lock:
            if self._preforked is None:
                with suppress(AdapterReadFailed):  # without a preforked reader the next read just starts later
                    self._preforked = _fork_reader(self._control, min(size_bytes, _MAX_AHEAD_BYTES))

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        self.num_starts += 1
        ours, theirs = socket.socketpair()
        environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(_PROJECT), "OMP_NUM_THREADS": "1"}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
        # A fork touches all of its memory for the first time, at 3 us per page (AMD EPYC, a virtual machine);
        # with huge pages, 10 MB of bfloat16 are read in 29 ms instead of 41.
        environment |= {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        command = [sys.executable, "-m", ReaderTask.__module__, str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
            )
        return ours, process

    def _stop(self) -> None:
        if self._preforked is not None:
            self._preforked.close()
            self._preforked = None
        self._control.close()
        self._process.kill()
        self._process.wait()


def _fork_reader(control: socket.socket, ahead_bytes: int) -> _Reader | None:
    """A new fork that prepares this much memory. None if the warm process is dead."""
    shared = _shared_file(ahead_bytes)
    ours, theirs = socket.socketpair()
    reader = _Reader(ours, shared)
    with theirs:
        try:
            socket.send_fds(control, [pack_request(ahead_bytes)], [theirs.fileno(), reader.shared])
        except OSError:
            reader.close()
            return None
    return reader


def _shared_file(size_bytes: int) -> int:
    """A descriptor of anonymous memory. AdapterReadFailed if the machine is out of memory."""
    with _memory_errors():
        if not hasattr(os, "memfd_create"):
            with tempfile.TemporaryFile() as file:
                file.truncate(size_bytes)
                return os.dup(file.fileno())
        descriptor = os.memfd_create("adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


def _fix_size(shared: int, size_bytes: int) -> None:
    """Set the size and, where the system can, seal it against later changes. Raises AdapterReadFailed."""
    with _memory_errors():
        os.ftruncate(shared, size_bytes)
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _write(shared: int, start: int, arrays: Sequence[NDArray[np.uint8]]) -> None:
    """Copy arrays into the memory, one after another. Raises AdapterReadFailed."""
    with _memory_errors():
        memory = np.frombuffer(mmap.mmap(shared, sum(array.nbytes for array in arrays), offset=start), np.uint8)
    for array in arrays:
        memory[: array.nbytes] = array
        memory = memory[array.nbytes :]


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Running out of memory or descriptors says nothing about the adapter: raise AdapterReadFailed."""
    try:
        yield
    except OSError as error:
        raise AdapterReadFailed(
            f"this machine has no memory for reading an adapter: {error}; try again later"
        ) from error


def _exchange(
    stream: socket.socket, question: bytes, deadline_s: float, task: ReaderTask | CombineTask
) -> bytes | None:
    """Send the question and return the whole answer; None if the reader is dead.

    Raises AdapterReadFailed on timeout.
    """
    answer = bytearray()
    try:
        stream.settimeout(_remaining_s(deadline_s))
        try:
            stream.sendall(question)
            stream.shutdown(socket.SHUT_WR)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            return None
        while True:
            stream.settimeout(_remaining_s(deadline_s))
            received = stream.recv(_RECEIVE_BYTES)
            answer += received
            if not received or len(answer) > _MAX_VERDICT_BYTES:
                return bytes(answer)
    except TimeoutError:
        # The reader's own alarm ends it a second later.
        raise AdapterReadFailed(
            f"'{task.name}' was not read within {task.seconds:.3g} s; reading was stopped"
        ) from None
    except OSError:  # the reader died during the exchange
        return b""


def _remaining_s(deadline_s: float) -> float:
    """Seconds until the deadline. Raises TimeoutError if it has passed, so a late answer is not read."""
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    return remaining_s


def _parse_verdict(
    text: bytes, shared: int, task: ReaderTask | CombineTask
) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    try:
        verdict = json.loads(text)
    except ValueError:
        raise AdapterReadFailed(
            f"reading '{task.name}' ended its process without a result: a crash, or no memory left"
        ) from None
    if "trace" in verdict:
        logger.error("bug in an adapter reader; please report it\n%s", verdict["trace"])
    if "header" not in verdict:
        found = getattr(errors, verdict["error"], None)
        kind = found if isinstance(found, type) and issubclass(found, AdapterError) else AdapterFormatError
        raise kind(verdict["message"])
    size = int(verdict["num_bytes"])
    if not 0 <= size <= task.memory_bytes:
        raise AdapterReadFailed(f"reading '{task.name}' gave {size} bytes; at most {task.memory_bytes} are possible")
    if not size:
        return verdict["header"], [np.empty(0, np.uint8)]
    mapped = mmap.mmap(shared, size, prot=mmap.PROT_READ)
    return verdict["header"], [np.frombuffer(mapped, np.uint8)]


def _has_hung_up(control: socket.socket) -> bool:
    """Whether the other end closed. It never sends anything, so anything readable is the end of the stream."""
    try:
        return control.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
