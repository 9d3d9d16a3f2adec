"""One `polylora serve` with the default configuration for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from load_tests.service import free_port
from tests.e2e.process import ServiceProcess


@pytest.fixture(scope="package")
def demo() -> Iterator[ServiceProcess]:
    """The service as a new user starts it: the demo base and the demo adapters."""
    port = free_port()
    command = [sys.executable, "-c", "import sys; from app.cli.main import main; sys.exit(main())"]
    process = ServiceProcess([*command, "serve", "--config", "configs/serve.yaml", "--port", str(port)], port, {})
    try:
        process.wait_until_healthy(600)
        yield process
    finally:
        process.stop()
