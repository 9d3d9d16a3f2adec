"""One `polylora serve` with the default configuration for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests.service import free_port
from tests.e2e.process import ServiceProcess


@pytest.fixture(scope="package")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, empty at first, from which the service loads adapters beside the demo's."""
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="package")
def demo(loras: Path) -> Iterator[ServiceProcess]:
    """The service as a new user starts it: the demo base and the demo adapters."""
    port = free_port()
    command = [sys.executable, "-c", "import sys; from app.cli.main import main; sys.exit(main())"]
    environment = {"LORA_PATH": str(loras)}
    process = ServiceProcess(
        [*command, "serve", "--config", "configs/serve.yaml", "--port", str(port)], port, environment
    )
    try:
        process.wait_until_healthy(600)
        yield process
    finally:
        process.stop()
