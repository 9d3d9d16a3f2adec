"""The Python handle's page: its command, run by a shell, reaches what `polylora serve` started on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.process import ServiceProcess

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "python-handle.md"


def test_another_ray_job_is_started_as_documented(demo: ServiceProcess) -> None:
    (command,) = (
        line.strip() for line in PAGE.read_text().splitlines() if "examples/ray_job.py " in line and "=" in line
    )
    environment = os.environ | {
        "RAY_TMPDIR": str(demo.folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    demo.announce_cluster()
    result = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "many: sql \"SELECT COUNT(*) FROM customers WHERE city = 'Oslo';\"" in result.stdout
