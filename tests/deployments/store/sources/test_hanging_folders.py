"""Local folders on a file system that hangs: they cost their own tenant's loads, and those only for a time."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.deployments.store.adapter_reader import AdapterReader
from app.deployments.store.host_cache import HostAdapterCache
from app.deployments.store.reader_pool import MAX_READERS_PER_LANE
from app.deployments.store.sources import fetch_timeout
from app.deployments.store.sources.fetch_timeout import MAX_HANGING, FolderTimeout
from app.deployments.store.sources.source_resolution import LocalSource
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.adapters.sandbox.reader_process import ReaderLimits
from app.engine.errors import NotFound, SourceError
from tests.deployments.ingress.dispatch.test_dispatcher import until
from tests.deployments.store.recorded_events import RecordedEvents
from tests.deployments.store.sources.conftest import OpenLibrary


class HangingMount:
    """What is beneath `root` hangs until `returns` is set."""

    def __init__(self, root: Path) -> None:
        self.root, self.returns = str(root), threading.Event()
        self.num_calls = 0

    def wait(self, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(f"{self.root}/"):
            self.num_calls += 1
            assert self.returns.wait(600)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingMount]:
    (tmp_path / "mount").mkdir()
    mount = HangingMount(tmp_path / "mount")
    for name in ("stat", "lstat"):
        call: Callable[..., os.stat_result] = getattr(os, name)

        def hang(path: Any, *args: Any, call: Callable[..., os.stat_result] = call, **options: Any) -> os.stat_result:
            mount.wait(path)
            return call(path, *args, **options)

        monkeypatch.setattr(os, name, hang)
    yield mount
    mount.returns.set()


@contextmanager
def open_cache(library: AdapterReader) -> Iterator[HostAdapterCache[PackedAdapter]]:
    cache = HostAdapterCache(library, lambda packed: packed, RecordedEvents(), max_bytes=1 << 20)
    yield cache
    cache.close()


async def test_two_tenants_whose_folders_hang_hold_up_no_others(
    library: AdapterReader, card: AdapterCard, mount: HangingMount
) -> None:
    with open_cache(library) as cache:
        loads = [asyncio.create_task(cache.load(f"mount/{n}", tenant)) for tenant in "ab" for n in range(100)]
        await until(lambda: mount.num_calls >= MAX_READERS_PER_LANE)
        async with asyncio.timeout(60):
            assert (await cache.load("original", "c")).card == card
        assert not any(load.done() for load in loads)
        mount.returns.set()
        assert {type(error) for error in await asyncio.gather(*loads, return_exceptions=True)} == {NotFound}


async def test_loads_from_a_folder_that_hangs_end_after_their_time_and_its_project_waits_for_it(
    open_library: OpenLibrary, card: AdapterCard, mount: HangingMount
) -> None:
    library = open_library(source_timeout_s=0.3)
    with open_cache(library) as cache:
        loads = [asyncio.create_task(cache.load(f"mount/{n}", "a")) for n in range(MAX_HANGING)]
        for load in loads:
            with pytest.raises(SourceError, match=r"not read within adapters.source_timeout_s 0.3: its file system"):
                await load
        library._folders._timeout_s = 300.0  # the others are not in a hurry
        with pytest.raises(SourceError, match=f"{MAX_HANGING} earlier reads of this project's local folders still"):
            await cache.load("original", "a")
        assert (await cache.load("original", "b")).card == card
        assert mount.num_calls == MAX_HANGING
        mount.returns.set()
        await until(lambda: not library._folders._hanging_calls._hanging)
        assert (await cache.load("original", "a")).card == card


async def test_a_file_system_that_hangs_once_its_folder_was_found_keeps_no_reader(
    tmp_path: Path,
    library: AdapterReader,
    card: AdapterCard,
    mount: HangingMount,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_cache(library) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(library, "version", lambda source, tenant_id: f"{source} {tenant_id}")
            patch.setattr(library._sources, "locate", lambda source: LocalSource(source, tmp_path / source))
            patch.setattr(library, "_folders", FolderTimeout(0.3))
            patch.setattr(library._validator, "reader_limits", ReaderLimits(base_s=0.0, bytes_per_s=1e15))
            loads = [cache.load(f"mount/{n}", tenant) for tenant in "ab" for n in range(MAX_READERS_PER_LANE)]
            errors = await asyncio.gather(*loads, return_exceptions=True)
        assert {type(error) for error in errors} == {SourceError}
        assert mount.num_calls == len(loads)
        async with asyncio.timeout(60):
            assert (await cache.load("original", "c")).card == card


def test_projects_whose_calls_hang_leave_one_thread_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_timeout, "MAX_ALL_HANGING", 3)
    folders, returns = FolderTimeout(0.01), threading.Event()

    def hang(tenant: str) -> str:
        with pytest.raises(SourceError) as caught:
            folders.call("x", tenant, lambda: returns.wait(600))
        return str(caught.value)

    assert all("0.01" in hang("a") for _ in range(3))
    assert "3 earlier reads" in hang("a")
    assert "0.01" in hang("b")
    assert "1 earlier reads" in hang("b")
    returns.set()
