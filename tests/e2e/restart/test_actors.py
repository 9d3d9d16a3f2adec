"""A named actor that is killed comes back; one that nobody watches leaves, and is made again when asked for."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from load_tests.service import end_session, start_session

#: By day tests/e2e/service/test_failures.py kills both named actors, which come back.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_an_actor_is_killed_deserted_and_called_again() -> None:
    with tempfile.TemporaryDirectory(prefix="plb", dir="/tmp", ignore_cleanup_errors=True) as folder:
        process = start_session(["-m", "tests.e2e.restart.actor_life"], Path(folder))
        try:
            printed, _ = process.communicate(timeout=600)
        finally:
            end_session(process.pid)
    assert process.returncode == 0, printed
    assert re.search(r"killed: a-named-actor\S* does not answer", printed)
    assert printed.splitlines()[-1] == "lived and left"
