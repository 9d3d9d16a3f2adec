"""A first visit to the console of the service that a new user starts, in a browser (see `test_browser.py`)."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.deployments.ingress.console.test_browser import NEEDS_BROWSER, tour
from tests.e2e.process import ServiceProcess

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, NEEDS_BROWSER]


async def test_a_newcomer_loads_compares_and_finds_out_why_a_load_failed(demo: ServiceProcess) -> None:
    folder = Path("examples/adapters/sql").resolve()
    try:
        print(await tour("newcomer", demo.url, str(folder)))
        aliases = httpx.get(f"{demo.url}/v1/aliases").json()
        assert "shop" in str(aliases)
    finally:
        for route in ("aliases/shop", "loras/sql-next", "loras/reports"):
            httpx.delete(f"{demo.url}/v1/{route}")
