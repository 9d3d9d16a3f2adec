"""A service in processes of its own: a command line, a Ray cluster in its own folder, ports of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.cli.ray_env import HA_PROXY_SWITCHES, ha_proxy_places
from load_tests.process_tree import session_processes
from load_tests.service import ROOT, end_session, own_environment

#: The command `polylora` with this Python.
POLYLORA = (sys.executable, "-c", "import sys; from app.cli.main import main; sys.exit(main())")


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
        self.environment = os.environ | ha_proxy_places() | own_environment(self.folder)
        self.environment |= {
            "OMP_NUM_THREADS": "1",
            **{name: value for name, value, _ in HA_PROXY_SWITCHES},
            # Of Ray's 30 s: HAProxy has to hear, before it is over, which ingress takes an old one's place.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
            # A proxy that a busy machine starts slowly is waited for; Ray would replace it after three times 5 s.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
            **environment,
        }
        self.environment.pop("RAY_ADDRESS", None)
        self.log = self.folder / "service.log"
        # A shell's background jobs start with SIGINT ignored, and so would what they start: as in a terminal instead.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [*command], cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
                )
        finally:
            signal.signal(signal.SIGINT, before)

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

    def wait_until_said(self, text: str, timeout_s: float) -> None:
        """Until the log has this text."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None:
                raise AssertionError(f"the service ended with {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{text!r} was not said in {timeout_s:g} s:\n{self.tail()}")
            time.sleep(0.3)

    def tail(self, num_chars: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-num_chars:]

    def stop(self, timeout_s: float = 300.0) -> int:
        """Ask it to end; returns its exit status, minus SIGKILL if it had not ended in time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end_session(self.process.pid)
            return self.process.wait(timeout_s)
        finally:
            end_session(self.process.pid)
            shutil.rmtree(self.folder, ignore_errors=True)

    def kill_everything(self) -> None:
        """What a machine does that loses power, as far as processes can tell: all of the session at once."""
        end_session(self.process.pid)
        self.process.wait(120)
        end_session(self.process.pid)
        shutil.rmtree(self.folder, ignore_errors=True)

    def announce_cluster(self) -> None:
        """Write where its cluster is to where Ray looks, with our RAY_TMPDIR, when it is asked for "auto".

        It would take any cluster that runs on this machine. An address it is given itself comes without the token.
        """
        (self.folder / "ray" / "ray_current_cluster").write_text(self._cluster_address())

    def _cluster_address(self) -> str:
        option = "--gcs-address="
        for pid in session_processes(self.process.pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"):
                    if word.startswith(option):
                        return word.removeprefix(option)
        raise AssertionError(f"no process of this service names its cluster:\n{self.tail()}")


def serve_run(document: dict[str, Any], port: int, environment: dict[str, str] | None = None) -> ServiceProcess:
    """`serve run <file>` with this document; `environment` is added to the usual one."""
    folder = Path(tempfile.mkdtemp(prefix="plc", dir="/tmp"))
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    # `serve run` itself gives up on its proxies after a minute, which a busy machine may need.
    code = "from ray.serve._private import api; api.HTTP_PROXY_TIMEOUT = 600; from ray.serve.scripts import cli; cli()"
    # Without an address it would join whatever Ray runs on this machine, with that one's environment.
    command = [sys.executable, "-c", code, "run", "--address", "local", str(path)]
    return ServiceProcess(command, port, environment or {})


def polylora_serve(
    document: dict[str, Any], port: int, environment: dict[str, str] | None = None, arguments: Sequence[str] = ()
) -> ServiceProcess:
    """`polylora serve` with this document and these arguments beside it; `environment` is added to the usual one."""
    path = Path(tempfile.mkdtemp(prefix="plc", dir="/tmp")) / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    command = [*POLYLORA, "serve", "--config", str(path), *arguments]
    return ServiceProcess(command, port, environment or {})
