"""The version of polylora, from pyproject.toml or the installed package."""

from __future__ import annotations

import functools
import importlib.metadata
import tomllib
from pathlib import Path


@functools.cache
def version() -> str:
    """The version in pyproject.toml."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.is_file():  # a checkout: the installed metadata may be older
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    return importlib.metadata.version("polylora")
