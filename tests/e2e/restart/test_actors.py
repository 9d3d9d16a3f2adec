"""A named actor that is killed comes back; one that nobody watches leaves, and is made again when asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from load_tests.service import ROOT, end_session, own_environment

pytestmark = pytest.mark.e2e


def test_an_actor_is_killed_deserted_and_called_again() -> None:
    with tempfile.TemporaryDirectory(prefix="plb", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = os.environ | own_environment(Path(folder))
        environment.pop("RAY_ADDRESS", None)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.restart.actor_life"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=600)
        finally:
            end_session(process.pid)
    assert process.returncode == 0, printed
    assert "killed: a-named-actor does not answer" in printed
    assert printed.splitlines()[-1] == "lived and left"
