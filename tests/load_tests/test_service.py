"""Nothing of a service is left when the program that measures it is ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from load_tests.process_tree import processes
from load_tests.service import Service


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
