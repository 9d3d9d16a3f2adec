"""vLLM's host process while vLLM loads: a stub takes the place of vLLM, and loads for ever."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import pytest

from app.engine.vllm.engine import WORKER
from app.engine.vllm.worker_process import PROTOCOL

STUBS = {
    "msgspec.py": """
import types, msgpack
msgpack = types.SimpleNamespace(encode=msgpack.packb, decode=msgpack.unpackb)
""",
    "vllm/__init__.py": "__version__ = '0'",
    "vllm/platforms.py": "import types; current_platform = types.SimpleNamespace(is_cpu=lambda: False)",
    "vllm/engine/arg_utils.py": "AsyncEngineArgs = dict",
    "vllm/v1/metrics/loggers.py": "StatLoggerBase = object",
    "vllm/v1/engine/async_llm.py": """
import os, subprocess, sys, time
class AsyncLLM:
    @staticmethod
    def from_engine_args(arguments, stat_loggers):
        core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(arguments["model"] + ".unfinished", "w") as file:
            file.write(str(core.pid))
        os.rename(file.name, arguments["model"])
        time.sleep(600)
""",
}
WAIT_S = 60


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    folder = tmp_path / "stubs"
    for name, text in STUBS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("has_read", [True, False])
def test_a_replica_that_ends_while_vllm_loads_takes_it_with_it(tmp_path: Path, stubs: Path, has_read: bool) -> None:
    """Killed or not: the kernel closes its end of the socket; what it has not read makes that an error."""
    ours, theirs = socket.socketpair()
    core_pid = tmp_path / "core_pid"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": str(stubs)},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    try:
        with ours:
            start = {"type": "start", "protocol": PROTOCOL, "arguments": {"model": str(core_pid)}}
            packed = msgpack.packb(start)
            ours.sendall(len(packed).to_bytes(4, "big") + packed)
            deadline_s = time.monotonic() + WAIT_S
            while not core_pid.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)  # it loads on while somebody waits for it
            if has_read:
                assert b"hello" in ours.recv(1 << 16)
        process.wait(WAIT_S)
        deadline_s = time.monotonic() + WAIT_S
        while Path(f"/proc/{core_pid.read_text()}").exists() and _state(core_pid.read_text()) not in "ZX":
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"
