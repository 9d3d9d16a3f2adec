"""The process that hosts vLLM, as its parent sees it: it is started, receives frames, sends frames, and ends.

Frames are msgpack maps behind 4 bytes of length on a Unix socket that the process inherits
(docs/reference/engine-protocol.md). What it prints is written to this process's log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgpack

from app.engine.errors import ConfigError, EngineFailure, OutOfDeviceMemory

#: vLLM's lines, with its own logger's level.
logger = logging.getLogger("vllm")

PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 28
#: How long the process may take to end by itself once it is asked to.
STOP_S = 5.0
#: Printed lines that are kept to explain a failure.
NUM_LAST_LINES = 60

Frame = dict[str, Any]

_LEVEL = re.compile(r"^(?:\(.{1,60}?\) ?)?(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
#: The last line of a traceback.
_EXCEPTION = re.compile(r"\b([A-Z]\w*(?:Error|Exception): .*)")
_NO_MEMORY = re.compile(
    r"out of memory|No available memory|larger than the (?:available|maximum)|less than desired", re.IGNORECASE
)
#: Variables that are not passed on: this environment's packages, and secrets of this service.
_OWN_VARIABLES = re.compile(r"PYTHONPATH|PYTHONHOME|VIRTUAL_ENV|POLYLORA_|LORA_HF_TOKEN")


class WorkerProcess:
    """One such process. `on_frame` gets its frames, and `on_end` the reason of its end, once, on a thread of this
    class."""

    def __init__(
        self,
        command: Sequence[str],
        arguments: Frame,
        environment: Mapping[str, str],
        on_frame: Callable[[Frame], None],
        on_end: Callable[[EngineFailure], None],
    ) -> None:
        """Start `command`, with the number of its socket as the last argument. ConfigError if it cannot be run."""
        self._on_frame, self._on_end = on_frame, on_end
        self._ready: Future[Frame] = Future()
        self._failed: Frame | None = None
        #: What it runs: name and version.
        self.engine_name = ""
        self._lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._is_closing = False
        self._socket, theirs = socket.socketpair()
        self._sending = threading.Lock()
        own = {key: value for key, value in os.environ.items() if not _OWN_VARIABLES.match(key)}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    env={**own, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # so that vLLM's own processes end with it
                )
            except OSError as error:
                self._socket.close()
                raise ConfigError(
                    f"engine.vllm.python: {command[0]!r} cannot be run: {error}; name the interpreter of an "
                    "environment that contains vLLM"
                ) from error
        self._threads = [
            threading.Thread(target=target, name=f"vllm-{target.__name__.strip('_')}", daemon=True)
            for target in (self._receive, self._copy_lines)
        ]
        for thread in self._threads:
            thread.start()
        self.send({"type": "start", "protocol": PROTOCOL, "arguments": arguments})

    @property
    def has_failed(self) -> bool:
        """Whether it said why it ends: one of its requests may be the cause, which no signal from outside is."""
        return self._failed is not None

    def wait_ready(self) -> Frame:
        """The `ready` frame, once the model is loaded. Raises ConfigError, or OutOfDeviceMemory if it does not fit."""
        try:
            return self._ready.result()
        except EngineFailure as failure:
            reason = str(failure)
            kind = OutOfDeviceMemory if _NO_MEMORY.search("\n".join([*self._lines, reason])) else ConfigError
            raise kind(f"vLLM did not start: {reason}; its lines in the log have the details") from failure

    def send(self, frame: Frame) -> None:
        """Send a frame. It is lost if the process has ended; `on_end` says so."""
        packed: bytes = msgpack.packb(frame)
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(len(packed).to_bytes(4, "big") + packed)

    def kill(self) -> None:
        """End the process and all that it has started, at once.

        Python's resource tracker stays where /proc shows it: it ends with the others, and removes their shared memory.
        """
        if not Path("/proc/self/stat").exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return
        deadline_s = time.monotonic() + STOP_S
        while (running := _running_in(self._process.pid)) and time.monotonic() < deadline_s:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)  # until they have ended, and for those that they have just started

    def close(self) -> None:
        """Ask the process to end, by the end of its input, and end it."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)  # ends a `send` to a process that reads nothing, too
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()
        self._process.wait()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(STOP_S)
        self._socket.close()

    def _receive(self) -> None:
        reason = "it closed the connection"
        try:
            with self._socket.makefile("rb") as stream:
                while len(head := stream.read(4)) == 4:
                    size = int.from_bytes(head, "big")
                    if size > MAX_FRAME_BYTES:
                        raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
                    packed = stream.read(size)
                    if len(packed) < size:
                        break
                    self._handle(msgpack.unpackb(packed))
        except (OSError, ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            reason = f"it sent something else than frames: {type(error).__name__}: {error}"
        failure = self._end_reason(reason)
        if not self._ready.done():
            self._ready.set_exception(failure)
        if not self._is_closing:
            self._on_end(failure)

    def _handle(self, frame: Frame) -> None:
        match frame["type"]:
            case "hello":
                if frame["protocol"] != PROTOCOL:
                    raise ValueError(f"it speaks protocol {frame['protocol']}, this engine {PROTOCOL}")
                self.engine_name = f"{frame['engine']} {frame['version']}"
            case "ready" if not self._ready.done():
                self._ready.set_result(frame)
            case "failed":
                self._failed = frame
            case _:
                self._on_frame(frame)

    def _end_reason(self, reason: str) -> EngineFailure:
        """Why the process ended: what it said, or its exit status."""
        if self._failed is not None:
            cause = next((found[1] for line in reversed(self._lines) if (found := _EXCEPTION.search(line))), "")
            reason = self._failed["error"]
            if cause and cause not in reason and self._failed["kind"] != "arguments":
                reason = f"{reason} ({cause})"
            return EngineFailure(f"vLLM failed: {reason}")
        if reason.startswith("it sent"):
            self.kill()
        try:
            status = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        last = next((line for line in reversed(self._lines) if line.strip()), "")
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return EngineFailure(f"vLLM's process {ended}: {reason}" + (f"; its last line: {last}" if last else ""))

    def _copy_lines(self) -> None:
        """Write what the process prints to the log."""
        assert self._process.stdout is not None
        level = logging.INFO
        with self._process.stdout as lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                if not line:
                    continue
                self._lines.append(line)
                if found := _LEVEL.match(line):
                    level = logging.getLevelNamesMapping()[found[1]]
                logger.log(level, "%s", line)


def _running_in(group: int) -> list[int]:
    """Processes of a group that have not ended, but Python's resource trackers."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) != group or state in "ZX":
                continue
            if b"multiprocessing.resource_tracker" not in (entry / "cmdline").read_bytes():
                found.append(pid)
    return found
