"""What a failed test of a running service shows besides its own traceback."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.e2e.process import ServiceProcess


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The last lines of the services it asked for."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            process = getattr(value, "process", None) if not isinstance(value, ServiceProcess) else value
            if isinstance(process, ServiceProcess) and process.log.exists():
                report.sections.append((f"log of {name}", process.tail()))
    return report
