"""Another Ray node of the service's cluster on this machine, so that a node can die while the service lives.

Its raylet runs in its own session with the service's environment. Nothing remains of the node after its raylet was
killed, and `start` makes a new one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from app.cli.ray_env import HA_PROXY_SWITCHES, RAY_SWITCHES
from app.deployments.rpc.uds_transport import FOLDER_VARIABLE
from load_tests.process_tree import session_processes
from load_tests.service import ROOT, Service, end_session

#: Time limit for the service's own Ray to start.
GCS_TIMEOUT_S = 120.0
#: What `ray start` prints when the node has joined, and the time limit for it.
JOINED, JOIN_TIMEOUT_S = "Ray runtime started", 300.0


class WorkerNode:
    """The node; each start gives it another `session_id`. Its sockets for frames are its own, as on a machine."""

    def __init__(self, service: Service, number: int) -> None:
        self._service = service
        self._sockets = {FOLDER_VARIABLE: str(service.folder / f"sockets{number}")}
        self._log = service.folder / f"node{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def session_id(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    @property
    def raylets(self) -> list[int]:
        """Process ids of its raylet: one while it lives."""
        return [pid for pid in session_processes(self.session_id) if "raylet/raylet" in _command(pid)]

    def start(self) -> None:
        """Start the node; returns at once, before it has joined."""
        switches = {name: value for name, value, _ in (*RAY_SWITCHES, *HA_PROXY_SWITCHES)}
        address = self._gcs_address()
        log = self._log.open("wb")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
                *("--address", address, "--node-ip-address", address.rpartition(":")[0]),
                *("--num-cpus", "2", "--object-store-memory", str(128 << 20)),
            ],
            cwd=ROOT,
            env=os.environ | switches | self._service.environment | self._sockets,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def wait_until_joined(self) -> None:
        """Wait for the node that was started. Raises TimeoutError with what it printed."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        while JOINED not in (printed := self._log.read_text(errors="replace")):
            assert self._process is not None, "it was started"
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise TimeoutError(f"a node did not join within {JOIN_TIMEOUT_S:g} s:\n{printed}")
            time.sleep(0.1)

    def end(self) -> None:
        """Stop what remains of the node."""
        if self._process is not None:
            end_session(self._process.pid)
            self._process.wait()

    def _gcs_address(self) -> str:
        """The GCS address in the environment of the service's processes."""
        option, deadline_s = "--gcs-address=", time.monotonic() + GCS_TIMEOUT_S
        while time.monotonic() < deadline_s:
            for pid in session_processes(self._service.process.pid):
                for word in _command(pid).split("\0"):
                    if word.startswith(option) and word != option:
                        return word.removeprefix(option)
            time.sleep(0.1)
        raise RuntimeError(f"no process of the service names its Ray cluster within {GCS_TIMEOUT_S:g} s")


def _command(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""
