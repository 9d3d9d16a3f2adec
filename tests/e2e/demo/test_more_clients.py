"""Clients that want other versions than the tests' own: in an environment made for them from the package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.demo.test_clients import MODELS
from tests.e2e.process import ServiceProcess

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]  # installing takes a minute, and a package index

PROGRAMS = Path(__file__).parent / "more_clients"
PACKAGES = ("llama-index-llms-openai-like==0.8.1", "instructor==1.17.0")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has them."""
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    found = folder / "bin" / "python"
    subprocess.run([found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES], check=True)
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("program", ["llama_index_client.py", "instructor_client.py"])
def test_a_client_of_other_versions(demo: ServiceProcess, python: Path, program: str, model: str) -> None:
    done = subprocess.run(
        [python, PROGRAMS / program, demo.url, model], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
