"""Fixtures every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import DEFAULT_MODEL_URI
from app.engine.models.sources import resolve_model


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo base model's file, fetched into the user's cache once."""
    return resolve_model(DEFAULT_MODEL_URI)
