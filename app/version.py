"""Which release of polylora this is.

In: the installed package, or the checkout's pyproject.toml. Out: its version. Rule: it is written down in
pyproject.toml and nowhere else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import tomllib
from pathlib import Path


@functools.cache
def version() -> str:
    """As in pyproject.toml."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.is_file():  # a checkout: what was installed from it may be older
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    return importlib.metadata.version("polylora")
