"""Markdown tables."""

from __future__ import annotations

import re
from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    titles = list(header)
    lines = [titles, ["---"] * len(titles), *[[_cell(cell) for cell in row] for row in rows]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)
