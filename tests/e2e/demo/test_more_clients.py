"""Clients that want other versions than the tests' own: in an environment made for them from the package index."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from app.config import DEFAULT_MODEL_URI
from app.engine.models.download.model_download import resolve_model
from load_tests.service import ROOT
from tests.e2e.demo.test_clients import ADAPTER, BASE, MODELS
from tests.e2e.process import ServiceProcess

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]  # installing takes a minute, and a package index

PROGRAMS = Path(__file__).parent / "more_clients"
PACKAGES = ("llama-index-llms-openai-like==0.8.1", "instructor==1.17.0")
#: A torch that the index has for this machine, since it has one for these tests.
LM_EVAL = ("lm-eval[api,hf]==0.4.13", "gguf", f"torch=={torch.__version__.partition('+')[0]}")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has them."""
    return _environment(tmp_path_factory.mktemp("clients"), PACKAGES)


def _environment(folder: Path, packages: Sequence[str]) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    found = folder / "bin" / "python"
    subprocess.run([found, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("program", ["llama_index_client.py", "instructor_client.py"])
def test_a_client_of_other_versions(demo: ServiceProcess, python: Path, program: str, model: str) -> None:
    _check(python, program, demo.url, model)


def test_lm_eval_measures_what_its_hugging_face_backend_measures(demo: ServiceProcess, tmp_path: Path) -> None:
    """For the base model and an adapter."""
    python, gguf = _environment(tmp_path, LM_EVAL), resolve_model(DEFAULT_MODEL_URI)
    _check(python, "lm_eval_client.py", demo.url, BASE, str(gguf))
    _check(python, "lm_eval_client.py", demo.url, ADAPTER, str(gguf), str(ROOT / "examples" / "adapters" / ADAPTER))


def _check(python: Path, program: str, *arguments: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(python.parents[1] / "hf")}
    command = [python, PROGRAMS / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
