"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.workers import NUM_WORKERS, group_of, turn_of

#: Workers side by side share the cores. Our kernels' bits do not depend on the number of threads, nor may a test.
if NUM_WORKERS > 1:
    torch.set_num_threads(max((os.cpu_count() or 1) // NUM_WORKERS, 1))

if not torch.cuda.is_available():
    # GPU kernels run in Triton's interpreter. It has to know before it is imported, which torch does not do.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import AutoModelForCausalLM, PreTrainedModel

from app.config import DEFAULT_MODEL_URI
from app.engine.models.sources import resolve_model
from tests.postgres import find_postgres

# A machine that is busy with other things is slow, not wrong.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=("cpu", "xla"), default="cpu", help="engine of tests/e2e/service")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where workers share the tests, say which stay together and in which order they are begun."""
    if NUM_WORKERS > 1:
        groups = group_of(items)
        for item in items:
            item.add_marker(pytest.mark.xdist_group(groups[item.path]))
        items.sort(key=lambda item: turn_of(groups[item.path]))


def pytest_report_header() -> str:
    """Which databases the registry's tests run on: a run without a server says so."""
    folder = find_postgres()
    return "registry databases: sqlite, " + (
        f"postgresql ({folder})" if folder else "NOT postgresql: no server found (Debian: apt-get install postgresql)"
    )


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo base model's file, fetched into the user's cache once."""
    return resolve_model(DEFAULT_MODEL_URI)


@pytest.fixture(scope="session")
def demo_transformers(demo_gguf: Path) -> PreTrainedModel:
    """The demo base model as transformers loads it, float32. Loading takes long: share it, unchanged."""
    return AutoModelForCausalLM.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32)
