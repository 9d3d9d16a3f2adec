"""Writes docs/reference: settings, commands, routes, metrics and measured performance, each from what defines it.

    python -m docs.generate     # `make docs` runs it; tests/test_docs.py fails when a committed page is stale

Nothing is started: no Ray, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generators.commands import cli_page
from docs.generators.metrics import metrics_page
from docs.generators.results import performance_page
from docs.generators.routes import http_page
from docs.generators.settings import settings_page

REFERENCE = Path(__file__).parent / "reference"
NOTE = "<!-- written by docs/generate.py; `make docs` writes it again -->\n\n"
_PAGES: Mapping[str, Callable[[], str]] = {
    "settings": settings_page,
    "cli": cli_page,
    "http": http_page,
    "metrics": metrics_page,
    "performance": performance_page,
}


def pages() -> dict[Path, str]:
    """The text of each generated page."""
    return {REFERENCE / f"{name}.md": NOTE + page() for name, page in _PAGES.items()}


def main() -> None:
    """Write every page."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
