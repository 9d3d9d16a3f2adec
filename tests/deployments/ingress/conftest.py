"""An HTTP service under test and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest_asyncio

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.guard import DoorRules
from tests.deployments.fleet import Fleet
from tests.deployments.http_service import WRITING_SPEC, Service, writing_text
from tests.deployments.managed import ManagedStore, wanted
from tests.engine.structured.tokens import tiny_vocabulary
from tests.fakes import fake_adapter


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    fleet = Fleet(1)
    managed = ManagedStore.at(tmp_path)
    for name in ("sql", "new", "two"):
        adapter = fake_adapter(name, 8)
        fleet.adapters[adapter.card.digest] = adapter
        managed.store.contents[name] = adapter.card.digest
    await managed.client.load_and_wait(wanted("sql", "sql"))
    service = Service(fleet, managed)
    yield service
    await service.close()
    await managed.close()
    fleet.stop()


@pytest_asyncio.fixture
async def writing(tmp_path: Path) -> AsyncIterator[Service]:
    """A service whose model can write JSON, and follows grammars."""
    fleet = Fleet(1, spec=WRITING_SPEC, grammars=tiny_vocabulary)
    managed = ManagedStore.at(tmp_path)
    service = Service(fleet, managed, writing_text())
    yield service
    await service.close()
    await managed.close()
    fleet.stop()


@pytest_asyncio.fixture
async def writer(writing: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it."""
    transport = httpx.ASGITransport(make_app(writing, DoorRules()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        yield client


@pytest_asyncio.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(service, DoorRules()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        yield client
