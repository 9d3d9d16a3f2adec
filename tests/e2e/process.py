"""A service in processes of its own: a command line, a Ray cluster in its own folder, free ports."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[2]


def tiny_document(
    port: int,
    folder: Path,
    engine: dict[str, Any],
    *,
    num_replicas: int = 1,
    preload: Sequence[str] = (),
    limits: dict[str, int] | None = None,
) -> dict[str, Any]:
    """A Serve application file for the tiny model in folder/model and the adapters in folder/loras."""
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "polylora",
                "route_prefix": "/",
                "import_path": "app.main:build",
                "args": {
                    "model": {"uri": str(folder / "model"), "name": "tiny"},
                    "engine": engine,
                    "adapters": {
                        "roots": [str(folder / "loras")],
                        "preload": [{"name": name, "path": name} for name in preload],
                    },
                    "limits": limits or {},
                },
                "deployments": [
                    {"name": "Ingress", "num_replicas": num_replicas, "ray_actor_options": {"num_cpus": 0.1}},
                    {"name": "EngineReplica", "num_replicas": num_replicas, "ray_actor_options": {"num_cpus": 0.5}},
                ],
            }
        ],
    }


class ServiceProcess:
    """Started in a session of its own, so that nothing of it survives the tests."""

    def __init__(self, command: Sequence[str], port: int, environment: dict[str, str]) -> None:
        # A short path: Ray makes Unix sockets in it, and their names are limited to 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="plt", dir="/tmp"))
        self.url = f"http://127.0.0.1:{port}"
        ingress_port, num_ingress_ports = free_ports(100), 100
        haproxy = self.folder / "haproxy"
        self.environment = os.environ | {
            "RAY_TMPDIR": str(self.folder),
            "PYTHONPATH": str(ROOT),
            "POLYLORA_STATE_DIR": str(self.folder / "state"),
            "OMP_NUM_THREADS": "1",
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ingress_port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ingress_port + num_ingress_ports - 1),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            **environment,
        }
        self.environment.pop("RAY_ADDRESS", None)
        self.log = self.folder / "service.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command], cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait_until_healthy(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise AssertionError(f"the service ended with {self.process.returncode}:\n{self.tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=60).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        raise AssertionError(f"not healthy after {timeout_s:g} s:\n{self.tail()}")

    def tail(self, num_chars: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-num_chars:]

    def stop(self, timeout_s: float = 300.0) -> int:
        """Ask it to end; returns its exit status, minus SIGKILL if it had not ended in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._end_session()
            return self.process.wait(timeout_s)
        finally:
            self._end_session()
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill_everything(self) -> None:
        """What a machine does that loses power, as far as processes can tell: all of the session at once."""
        self._end_session()
        self.process.wait(120)
        self._end_session()
        shutil.rmtree(self.folder, ignore_errors=True)

    def announce_cluster(self) -> None:
        """Write where its cluster is to where Ray looks, with our RAY_TMPDIR, when it is asked for "auto".

        It would take any cluster that runs on this machine. An address it is given itself comes without the token.
        """
        (self.folder / "ray" / "ray_current_cluster").write_text(self._cluster_address())

    def _cluster_address(self) -> str:
        option = "--gcs-address="
        for pid in self._session():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"):
                    if word.startswith(option):
                        return word.removeprefix(option)
        raise AssertionError(f"no process of this service names its cluster:\n{self.tail()}")

    def _session(self) -> Iterator[int]:
        """All its processes."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, ProcessLookupError):
                if os.getsid(int(entry.name)) == self.process.pid:
                    yield int(entry.name)

    def _end_session(self) -> None:
        """Whatever Ray started is in our session; nothing of it may outlive the test."""
        for pid in self._session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def serve_run(document: dict[str, Any], port: int, environment: dict[str, str] | None = None) -> ServiceProcess:
    """`serve run <file>` with this document; `environment` is added to the usual one."""
    folder = Path(tempfile.mkdtemp(prefix="plc", dir="/tmp"))
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    # Without an address it would join whatever Ray runs on this machine, with that one's environment.
    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", "--address", "local", str(path)]
    return ServiceProcess(command, port, environment or {})


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many ports on which nobody listens.

    Between those of Ray's workers (up to 19,999) and those that the kernel gives out (from 32,768 on): nobody else
    takes one of them before the service does, which may be a minute from now.
    """
    while True:
        first = random.randrange(20_000, 32_768 - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
