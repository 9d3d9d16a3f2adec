"""The store's process: other settings reach it while it works, and are what its next life begins with."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from app.config import AppConfig, load_config
from app.deployments.registry.models import DEFAULT_TENANT, UPLOADED, LoadRequest
from app.deployments.store.factory import ConfiguredStore
from app.deployments.store.service import StoreService
from app.deployments.store.tier_counters import TierCounters
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.config import CpuConfig, EngineConfig
from app.engine.errors import AdapterError, AdapterFormatError, AdapterTooLarge, ConfigError, NotFound
from app.engine.models.checkpoint import load_checkpoint
from tests.deployments.managed import ADA, MINE, fails, upload, wanted
from tests.e2e.tiny import save_adapter, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, and one adapter under each of two roots."""
    folder = tmp_path_factory.mktemp("opening")
    save_tiny_model(folder / "model")
    for seed, root in enumerate(("old", "new")):
        save_adapter(folder / root / root, rank=2, seed=seed)
    return folder


class Process:
    """An actor's process: `settings` makes what a service with such adapters says."""

    def __init__(self, folder: Path, state: Path) -> None:
        self._folder, self._state = folder, state

    def config(self, root: str, **adapters: Any) -> AppConfig:
        roots = {"roots": [str(self._folder / root)], "state_dir": str(self._state)}
        model = {"uri": str(self._folder / "model"), "name": adapters.pop("model_name", "base")}
        return load_config({"model": model, "adapters": roots | adapters}, environ={})

    def open(self, config: AppConfig) -> None:
        self.opened: ConfiguredStore[PackedAdapter] = ConfiguredStore(
            config.for_store, lambda packed: packed, lambda packed: packed, TierCounters(), actor="the actor"
        )
        self.service = StoreService(self.opened.parts, lambda: None)

    async def close(self) -> None:
        await self.opened.parts.registry_service.close()
        self.opened._store.close()
        self.opened._store._reader.close()
        self.opened._registry.close()


@pytest_asyncio.fixture
async def process(folder: Path, tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(folder, tmp_path / "state")
    process.open(process.config("old"))
    yield process
    await process.close()


async def test_a_service_that_starts_tells_the_store_its_settings(process: Process) -> None:
    service = process.service
    await service.preload(process.config("old").for_store.model_dump_json())
    _, entry = await service.load_and_wait(wanted("a", "old"))
    library = process.opened._store._reader
    await service.preload(process.config("old").for_store.model_dump_json())
    assert process.opened._store._reader is library, "equal settings change nothing"
    small = process.config(
        "new",
        host_cache_bytes=1 << 20,
        max_pinned_fraction=0.0,
        model_name="renamed",
        preload=[{"name": "b", "path": "new"}],
    )
    await service.preload(small.for_store.model_dump_json())
    assert process.opened._store._cache.max_bytes == 1 << 20
    names = {item.name for item in process.opened.parts.registry.catalog.entries()}
    assert names == {"a", "b"}, "what there was stays, and the new preload is here"
    assert isinstance(await fails(service.load(wanted("renamed", "new"))), Exception)
    assert isinstance(await fails(service.load_and_wait(wanted("c", "old"))), NotFound), "under no root any more"
    assert isinstance(await fails(service.configure("a", pinned=True, **ADA)), AdapterTooLarge)
    await fetched(service, entry.ref)


async def test_the_next_life_begins_with_what_was_told_last(process: Process) -> None:
    await process.service.preload(process.config("new").for_store.model_dump_json())
    await process.close()
    process.open(process.config("old"))  # Ray makes it anew with what it was made with
    job, _ = await process.service.load_and_wait(wanted("b", "new"))
    assert job.tenant_id == DEFAULT_TENANT


async def test_settings_that_cannot_be_are_refused_and_change_nothing(process: Process) -> None:
    before = process.opened._store._reader
    bad = json.loads(process.config("old").for_store.model_dump_json())
    bad["adapters"] |= {"custom_fetcher": "no.such:function", "hub": []}
    error = await fails(process.service.preload(json.dumps(bad)))
    assert isinstance(error, ConfigError)
    assert "no.such:function" in str(error)
    assert process.opened._store._reader is before
    await process.service.load_and_wait(wanted("a", "old"))
    assert process.opened.parts.registry.catalog.get("a", **MINE) is not None


def files_of(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / name / name
    return (path / "adapter_config.json").read_bytes(), (path / "adapter_model.safetensors").read_bytes()


async def fetched(service: StoreService[PackedAdapter], ref: AdapterRef) -> PackedAdapter:
    """The adapter, asked for again while it is being read, as a replica does."""
    while (adapter := await service.fetch(ref)) is None:
        pass
    return adapter


PUT = LoadRequest(DEFAULT_TENANT, "tuned", UPLOADED, "ada")


async def test_bytes_are_the_adapter_that_their_files_are(process: Process, folder: Path) -> None:
    service = process.service
    _, registered = await service.load_and_wait(wanted("by-path", "old"))
    _, first = await upload(service, PUT, *files_of(folder, "old"))
    assert first.ref.digest == registered.ref.digest, "the contents are what counts, not the way"
    job, second = await upload(service, PUT, *files_of(folder, "new"))
    assert (second.ref.generation, job.generation) == (first.ref.generation + 1, second.ref.generation)
    assert second.ref.digest != first.ref.digest
    await fetched(service, second.ref)
    _, again = await upload(service, PUT, *files_of(folder, "new"))
    assert again.ref == second.ref, "equal contents are no new generation"


async def test_an_upload_is_there_in_the_next_life(process: Process, folder: Path) -> None:
    _, entry = await upload(process.service, PUT, *files_of(folder, "old"))
    await process.close()
    process.open(process.config("new"))
    await fetched(process.service, entry.ref)


async def test_wrong_files_are_refused_and_the_name_means_what_it_meant(process: Process, folder: Path) -> None:
    service = process.service
    config, weights = files_of(folder, "old")
    _, before = await upload(service, PUT, config, weights)
    cut, pickled = weights[:-1], b"\x80\x04]q\x00."
    for wrong in (cut, pickled, b"", weights[8:]):
        assert isinstance(await fails(upload(service, PUT, config, wrong)), (AdapterFormatError, AdapterTooLarge))
    for wrong in (b"{}", b"[", b"\xff", config.replace(b"LORA", b"IA3")):
        assert isinstance(await fails(upload(service, PUT, wrong, weights)), AdapterError), wrong
    present = process.opened.parts.registry.catalog.get("tuned", **MINE)
    assert present is not None
    assert present.ref == before.ref


async def test_adapters_are_read_and_projects_found_for_the_arithmetic_of_the_engines(
    process: Process, folder: Path
) -> None:
    config = process.config("old")
    config = config.model_copy(update={"engine": EngineConfig(cpu=CpuConfig(compute="int8"))})
    tenants = config.tenants.model_copy(update={"base_uri": config.model.uri, "base_compute": "int8"})
    await process.close()
    process.open(config.model_copy(update={"tenants": tenants}))
    digest = load_checkpoint(folder / "model").computed_in("int8").spec.digest
    assert (process.opened._checkpoint.spec.digest, process.opened._tenants_digest) == (digest, digest)
