"""One adapter in files, a library that reads whatever a test's sources give, and the servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from app.deployments.registry.catalog import Catalog
from app.deployments.registry.db.database import Database, sqlite_url
from app.deployments.registry.models import DEFAULT_TENANT, CatalogEntry, LoadRequest
from app.deployments.store.adapter_reader import AdapterReader
from app.deployments.store.disk_tier import DiskTier
from app.deployments.store.host_cache import HostAdapterCache
from app.deployments.store.sources.source_resolution import Fetcher, Sources
from app.deployments.store.tier_counters import TierCounters
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.adapters.sandbox.validator import Validator
from app.model_names import check_name
from tests.deployments.store.recorded_events import RecordedEvents
from tests.deployments.store.sources.servers import FileServer, HubServer
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, tiny_spec, write_peft

SPEC = tiny_spec()
OpenLibrary = Callable[..., AdapterReader]


class Store(HostAdapterCache[PackedAdapter]):
    """With names, as the registry service gives them."""

    catalog: Catalog

    async def register(self, name: str, source: str, tenant_id: str = DEFAULT_TENANT) -> CatalogEntry:
        check_name(name)
        uri, card = await self.load(source, tenant_id)
        return self.catalog.register(LoadRequest(tenant_id, name, source, "ada"), uri, card)

    def entries(self) -> list[CatalogEntry]:
        return self.catalog.entries()


def new_adapter(folder: Path, rank: int = 2) -> tuple[dict[str, bytes], AdapterCard]:
    """(files by name, the card they have) of a fresh random adapter, written to `folder`."""
    write_peft(folder, peft_config(rank, ["q_proj"]), peft_tensors(random_arrays(SPEC, rank, ["q_proj"])))
    return {file.name: file.read_bytes() for file in folder.iterdir()}, read_adapter(folder, SPEC).card


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return new_adapter(tmp_path / "original")[0]


@pytest.fixture
def card(tmp_path: Path, files: dict[str, bytes]) -> AdapterCard:  # noqa: ARG001  (written by it)
    return read_adapter(tmp_path / "original", SPEC).card


@pytest.fixture(scope="module")
def validator() -> Iterator[Validator]:
    validator = Validator()
    yield validator
    validator.close()


@pytest.fixture
def open_library(tmp_path: Path, validator: Validator) -> Iterator[OpenLibrary]:
    tiers: list[DiskTier] = []
    validators: list[Validator] = []

    def open_one(
        *fetchers: Fetcher,
        max_bytes: int = 1 << 20,
        signatures: bool = False,
        features: frozenset[str] = frozenset(),
        source_timeout_s: float = 300.0,
    ) -> AdapterReader:
        counts = TierCounters()
        reader = validator
        if features:
            reader = Validator(supported_features=features)
            validators.append(reader)
        tiers.append(DiskTier(tmp_path / "disk", max_bytes, "lru", counts, RecordedEvents()))
        sources = Sources([tmp_path], fetchers)
        return AdapterReader(
            sources,
            tiers[-1],
            reader,
            SPEC,
            counts,
            RecordedEvents(),
            signatures=signatures,
            source_timeout_s=source_timeout_s,
        )

    yield open_one
    for opened in (*tiers, *validators):
        opened.close()


@pytest.fixture
def library(open_library: OpenLibrary) -> AdapterReader:
    """Local folders only; a test may have its own."""
    return open_library()


@pytest_asyncio.fixture
async def store(tmp_path: Path, library: AdapterReader) -> AsyncIterator[Store]:
    store = Store(library, lambda packed: packed, RecordedEvents(), max_bytes=1 << 20, counts=library.counts)
    store.catalog = Catalog(Database(sqlite_url(tmp_path / "c.sqlite"), "base"))
    yield store
    store.close()


@pytest.fixture
def server() -> Iterator[FileServer]:
    server = FileServer()
    yield server
    server.close()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    hub = HubServer()
    yield hub
    hub.close()
