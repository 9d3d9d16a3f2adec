"""Ray Serve is imported here first, for all tests below: its own warnings are not ours, and ours are errors."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401


@pytest.fixture(autouse=True)
def _changes_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change returns when everybody has it, on a machine that is busy for seconds, too."""
    for module in ("registry.feed.change_feed", "tenancy.service"):
        monkeypatch.setattr(f"app.deployments.{module}.SETTLE_TIMEOUT_S", 60.0)
