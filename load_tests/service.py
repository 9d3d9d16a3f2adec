"""A separate service for a measurement or a test: processes, ports, folders, and their cleanup.

It runs in its own session and shares no port, folder or Ray with another on the same machine. Nothing of it remains
afterwards, also when a SIGTERM ends this process.
"""

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
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple, Self

import yaml

from app.cli.config_file import IMPORT_PATH
from load_tests.process_tree import session_processes

ROOT = Path(__file__).parents[1]
NUM_INGRESS_PORTS = 100


class Line(NamedTuple):
    """Something the service printed, and how long after its start."""

    seconds: float
    text: str


def serve_arguments(config: str, port: int, host: str = "127.0.0.1") -> list[str]:
    """`polylora` with these is what `make serve` runs."""
    return ["serve", "--config", config, "--host", host, "--port", str(port)]


def settings_with(config: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The settings file `config` as a file in `folder`, its `args` as `change` leaves them."""
    document = yaml.safe_load(config.read_text(encoding="utf-8"))
    application = next(item for item in document["applications"] if item["import_path"] == IMPORT_PATH)
    change(application["args"])
    settings = folder / "serve.yaml"
    settings.write_text(yaml.safe_dump(document), encoding="utf-8")
    return settings


def settings_with_adapters(config: Path, folder: Path, adapters: dict[str, object]) -> Path:
    """The settings file `config` with its `adapters` replaced, as a file in `folder`."""
    return settings_with(config, folder, lambda args: args.update(adapters=adapters))


class Service:
    """`polylora serve`, from the start of its first process to the end of its last."""

    def __init__(
        self, arguments: Sequence[str], environment: dict[str, str] | None = None, checkout: Path = ROOT
    ) -> None:
        """`checkout`: the repository whose code it runs, with this Python."""
        # A short path: Ray makes Unix sockets in it, and their names are limited to 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="plb", dir="/tmp"))
        self.lines: list[Line] = []
        scripts = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
        module, _, function = scripts["polylora"].partition(":")
        code = f"import sys; from {module} import {function}; sys.exit({function}())"
        self._started_s = time.perf_counter()
        #: Environment variables of its processes in addition to this one's.
        self.environment = own_environment(self.folder) | (environment or {})
        self.process = start_session(["-c", code, *arguments], self.folder, self.environment, checkout)
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        """Enter from the main thread: until the exit a SIGTERM raises SystemExit, which would otherwise leave the
        service running.
        """
        self._on_sigterm = signal.signal(signal.SIGTERM, _exit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def wait_for(self, text: str, timeout_s: float = 900.0) -> float:
        """Seconds from the start to the first line that holds `text`. Raises RuntimeError with what was printed."""
        deadline_s = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline_s:
            is_over = not self._reader.is_alive()
            for line in list(self.lines):
                if text in line.text:
                    return line.seconds
            if is_over:
                break
            time.sleep(0.02)
        printed = "\n".join(line.text for line in self.lines)
        raise RuntimeError(f"{text!r} was not printed within {timeout_s:g} s; printed was:\n{printed}")

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ask it to end, and end what is left."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)  # a shell's background jobs, and their children, ignore SIGINT
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        finally:
            end_session(self.process.pid)
            self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        assert self.process.stdout is not None, "it is a pipe"
        with self.process.stdout as stream:
            for text in stream:
                self.lines.append(Line(time.perf_counter() - self._started_s, text.rstrip()))


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def end_session(session_id: int) -> None:
    """Stop a session: everything that Ray starts is in the session of its starter."""
    for pid in session_processes(session_id):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start_session(
    arguments: Sequence[str], folder: Path, environment: dict[str, str] | None = None, checkout: Path = ROOT
) -> subprocess.Popen[str]:
    """Python with these arguments, in a session and an `own_environment` of its own; what it prints is piped."""
    environment = os.environ | own_environment(folder) | (environment or {}) | {"PYTHONPATH": str(checkout)}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def own_environment(folder: Path) -> dict[str, str]:
    """Environment with Ray, HAProxy and the registry in this folder, on ports of their own."""
    haproxy = folder / "haproxy"
    ingress_port = free_ports(NUM_INGRESS_PORTS)
    return {
        "RAY_TMPDIR": str(folder),
        "PYTHONPATH": str(ROOT),
        "POLYLORA_STATE_DIR": str(folder / "state"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ingress_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ingress_port + NUM_INGRESS_PORTS - 1),
    }


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports.

    They lie between those of Ray's workers (up to 19,999) and those that the kernel gives out (from 32,768 on): no
    other process takes one of them before the service does, which may be a minute from now. None is given out twice,
    nor to two of pytest's workers.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_ports = (32_768 - 20_000) // max(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), worker + 1)
    lowest = 20_000 + worker * num_ports
    while True:
        first = random.randrange(lowest, lowest + num_ports - count)
        ports = range(first, first + count)
        if _given.isdisjoint(ports) and all(map(_is_free, ports)):
            _given.update(ports)
            return first


_given = set[int]()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
