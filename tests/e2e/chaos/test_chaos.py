"""Processes die and stand still under traffic: every answer is right, and every acknowledged change is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from load_tests.service import ROOT


def chaos(*options: str, timeout_s: float) -> None:
    """Run the command; what it found is the failure."""
    done = subprocess.run(
        [sys.executable, "-m", "load_tests.chaos", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.stdout, done.stderr[-6000:]
    report = json.loads(done.stdout)
    assert report["wrong"] == [], "\n".join([*report["events"], *report["wrong"]])
    assert done.returncode == 0
    assert report["events"]
    assert report["requests"]["answered"] > 0


@pytest.mark.e2e
@pytest.mark.nightly  # by day tests/e2e/service/test_failures.py kills one of each
@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_a_minute_of_chaos(num_nodes: int) -> None:
    options = ("--nodes", str(num_nodes), "--every", "5", "--streams", "16", "--requests", "28")
    chaos("--minutes", "1", *options, timeout_s=900)


@pytest.mark.e2e
@pytest.mark.nightly
def test_ten_minutes_of_chaos() -> None:
    chaos("--minutes", "10", "--every", "20", timeout_s=1800)
