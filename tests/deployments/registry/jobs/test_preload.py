"""What a configuration names is loaded once; operators and what is registered come first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from app.config import PreloadedAdapter
from app.deployments.registry.jobs import preload as preload_module
from app.deployments.registry.jobs.preload import Preloader
from app.deployments.registry.models import DEFAULT_TENANT
from app.deployments.registry.registry import Registry
from app.engine.errors import NotFound
from tests.deployments.managed import ADA, FakeStore, ManagedStore, fails, wanted


class Service:
    """One database; the store may be restarted, with sources that are there or not."""

    def __init__(self, open_again: Callable[..., Registry]) -> None:
        self._open = open_again
        self.managed = self.restart({"v1": "d1", "v2": "d2"})

    def restart(self, contents: dict[str, str]) -> ManagedStore:
        store = FakeStore()
        store.contents |= contents
        self.managed = ManagedStore(self._open(), store)
        return self.managed

    async def preload(self, roots: Sequence[Path] = (), *, about: str | None = None, **names: str) -> Sequence[str]:
        """What was read for it. `about`: what the configuration says of each."""
        before = len(self.managed.store.loads)
        wanted = [PreloadedAdapter(name=name, path=path, description=about) for name, path in names.items()]
        preloader = Preloader(self.managed.registry, self.managed.registry_service)
        preloader.configure(wanted, roots)
        await preloader.preload()
        return self.managed.store.loads[before:]

    def description(self, name: str) -> str:
        """As every ingress has it."""
        entry = self.managed.view.adapter(name, DEFAULT_TENANT)
        assert entry is not None
        return entry.description

    def meaning(self, name: str) -> tuple[int, str] | None:
        entry = self.managed.registry.catalog.get(name, tenant_id=DEFAULT_TENANT)
        return None if entry is None else (entry.ref.generation, entry.ref.digest)


@pytest_asyncio.fixture
async def service(open_again: Callable[..., Registry]) -> AsyncIterator[Service]:
    service = Service(open_again)
    yield service
    await service.managed.close()


async def test_what_is_registered_starts_without_its_source(service: Service) -> None:
    assert await service.preload(sql="v1") == ["v1"]
    await service.managed.close()
    service.restart({})
    assert await service.preload(sql="v1") == []
    assert service.meaning("sql") == (1, "d1")


async def test_what_an_operator_changed_stays_changed(service: Service) -> None:
    await service.preload(sql="v1", gone="v1", other="v1")
    await service.managed.client.load_and_wait(wanted("sql", "v2"))
    for name in ("gone", "other"):
        await service.managed.client.begin_unload(name, **ADA)
    await service.managed.client.put_alias("other", {"sql": 1.0}, **ADA)
    await service.managed.close()
    service.restart({"v1": "d1", "v2": "d2"})
    assert await service.preload(sql="v1", gone="v1", other="v1") == []
    assert await service.preload(other="v2") == [], "an alias is in the way, and no error"
    assert service.meaning("sql") == (2, "d2")
    assert service.meaning("gone") is None


async def test_another_place_in_the_configuration_is_news(service: Service) -> None:
    await service.preload(sql="v1")
    assert sorted(await service.preload(sql="v2", new="v1")) == ["v1", "v2"]
    assert service.meaning("sql") == (2, "d2")
    assert await service.preload(sql="v2", new="v1") == []


async def test_a_name_that_was_registered_by_hand_is_left_alone(service: Service) -> None:
    await service.managed.client.load_and_wait(wanted("sql", "v2"))
    assert await service.preload(sql="v1") == []
    assert service.meaning("sql") == (1, "d2")
    assert await service.preload(sql="v2") == ["v2"], "from now on another place is news"


async def test_what_fails_is_said_and_tried_again(service: Service) -> None:
    assert isinstance(await fails(service.preload(sql="absent", good="v1")), NotFound)
    service.managed.store.contents["absent"] = "d3"
    assert "absent" in await service.preload(sql="absent")  # beside what the first time may still be reading


async def test_a_folder_that_moved_with_its_root_is_read_where_it_is_now(service: Service, tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    await service.preload(sql="v1", other="v1")  # from /roots/v1, as the store says, which is not under `tmp_path`
    await service.managed.client.load_and_wait(wanted("other", "v2"))
    await service.managed.close()
    service.restart({"v1": "d1", "v2": "d2"})
    assert await service.preload(sql="v1", other="v1") == [], "no root is known"
    assert await service.preload(roots=[tmp_path / "elsewhere"], sql="v1", other="v1") == [], "it is not there either"
    assert await service.preload(roots=[tmp_path], sql="v1", other="v1") == ["v1"], "the other is an operator's now"
    assert service.meaning("sql") == (1, "d1")


async def test_what_is_registered_starts_while_its_file_system_hangs(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await service.preload(sql="v1")
    returns, ended = threading.Event(), threading.Event()

    def hang(path: str, roots: Sequence[Path]) -> Path:
        assert returns.wait(600)
        ended.set()
        raise NotFound(f"{path} is not under {roots}")

    monkeypatch.setattr(preload_module, "resolve_adapter_path", hang)
    monkeypatch.setattr(preload_module, "MAX_LOOK_S", 0.05)
    assert await service.preload(roots=[tmp_path], sql="v1", new="v2") == ["v2"]
    assert "does not answer within 0.05 s" in caplog.text
    returns.set()
    assert await asyncio.to_thread(ended.wait, 60)


async def test_a_configuration_describes_what_it_has_loaded(service: Service) -> None:
    await service.preload(sql="v1", about="answers in SQL")
    assert service.description("sql") == "answers in SQL"
    assert await service.preload(sql="v1", about="asks a shop's database") == [], "nothing is read for it"
    assert service.description("sql") == "asks a shop's database"
    await service.preload(sql="v1")
    assert service.description("sql") == "asks a shop's database", "as it was"


async def test_a_configuration_that_begins_to_describe_needs_no_source(service: Service) -> None:
    await service.preload(sql="v1")
    await service.managed.close()
    service.restart({})
    assert await service.preload(sql="v1", about="answers in SQL") == []
    assert service.description("sql") == "answers in SQL"


async def test_an_operator_s_description_stays_until_the_configuration_has_another(
    service: Service, tmp_path: Path
) -> None:
    await service.preload(sql="v1", about="answers in SQL")
    await service.managed.client.configure("sql", description="an operator's", **ADA)
    await service.preload(sql="v1", about="answers in SQL")
    assert service.description("sql") == "an operator's"
    (tmp_path / "v1").mkdir()
    assert await service.preload([tmp_path], sql="v1", about="answers in SQL") == ["v1"]
    assert service.description("sql") == "an operator's", "its folder has moved, no more"
    await service.preload(sql="v1", about="another")
    assert service.description("sql") == "another"


async def test_what_others_loaded_or_unloaded_is_not_described(service: Service) -> None:
    await service.preload(sql="v1", gone="v1", about="one")
    await service.managed.client.load_and_wait(wanted("sql", "v2"))
    await service.managed.client.begin_unload("gone", **ADA)
    await service.managed.client.load_and_wait(wanted("mine", "v1"))
    assert await service.preload(sql="v1", gone="v1", mine="v1", about="two") == []
    assert service.description("sql") == "one", "as it was before the other contents, which have none"
    assert service.description("mine") == ""
    assert service.meaning("gone") is None
