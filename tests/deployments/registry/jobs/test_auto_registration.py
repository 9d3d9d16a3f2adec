"""Names that nobody has registered: found once, remembered as absent for a while, and never against their tenant."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest_asyncio

from app.deployments.registry.jobs.auto_registration import MAX_LOOKUPS, MAX_LOOKUPS_PER_TENANT, ResolverSettings
from app.deployments.registry.models import DEFAULT_TENANT
from app.deployments.registry.registry import Registry
from app.engine.errors import AdapterFormatError, AdapterQuarantined, NotReady, SourceError
from tests.deployments.managed import ADA, MINE, FakeStore, ManagedStore, fails, wanted


class In:
    """A resolver that says everything is in one folder; it takes a note of what it is asked."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.asked: list[str] = []

    def source(self, name: str, tenant_id: str) -> str | None:  # noqa: ARG002
        self.asked.append(name)
        return f"{self._folder}/{name}"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Service:
    """A registry, a store that reads from a dictionary, and one place to look for names: `hub`."""

    def __init__(self, registry: Registry) -> None:
        self.clock, self.hub = Clock(), In("hub")
        self.store = FakeStore()
        self.managed = ManagedStore(registry, self.store, self.clock)
        self.managed.resolution.reconfigure(ResolverSettings([self.hub], negative_ttl_s=30.0, timeout_s=60.0))

    async def resolve(self, name: str, tenant_id: str = DEFAULT_TENANT) -> bool:
        return await self.managed.client.resolve(name, tenant_id=tenant_id, who="bob")

    def meaning(self, name: str, tenant_id: str = DEFAULT_TENANT) -> str | None:
        entry = self.managed.view.adapter(name, tenant_id)
        return None if entry is None else entry.ref.digest


@pytest_asyncio.fixture
async def service(open_again: Callable[..., Registry]) -> AsyncIterator[Service]:
    service = Service(open_again())
    yield service
    await service.managed.close()


async def test_a_name_is_found_read_once_and_served_everywhere(service: Service) -> None:
    service.store.contents["hub/sql"] = "d1"
    assert await service.resolve("sql")
    assert service.meaning("sql") == "d1", "every ingress knows it when the call returns"
    assert service.store.loads == ["hub/sql"]
    (record, *_) = await service.managed.client.audit("sql", limit=10, before=None, **MINE)
    assert "resolver for bob" in {record.who}
    job = service.managed.registry.jobs.latest("sql", **MINE)
    assert job is not None
    assert (job.state, job.source) == ("LOADED", "hub/sql")


async def test_what_is_found_is_its_tenants_alone(service: Service) -> None:
    service.store.contents["hub/sql"] = "d1"
    assert await service.resolve("sql", "proj_a")
    assert service.meaning("sql", "proj_a") == "d1"
    assert service.meaning("sql") is None


async def test_names_that_nobody_has_leave_nothing_in_the_registry_and_are_remembered(service: Service) -> None:
    assert [await service.resolve("nobody") for _ in range(3)] == [False] * 3
    assert service.hub.asked == ["nobody"]
    assert service.managed.registry.jobs.latest("nobody", **MINE) is None
    service.store.contents["hub/nobody"] = "d1"
    service.clock.now_s += 29
    assert not await service.resolve("nobody")
    service.clock.now_s += 1
    assert await service.resolve("nobody")


async def test_other_places_are_looked_in_at_once_and_in_order(service: Service) -> None:
    assert not await service.resolve("sql")
    first, second = In("first"), In("second")
    service.store.contents |= {"first/json": "d1", "second/json": "d2", "second/sql": "d3"}
    service.managed.resolution.reconfigure(ResolverSettings([first, second]))
    assert await service.resolve("sql")
    assert await service.resolve("json")
    assert (service.meaning("sql"), service.meaning("json")) == ("d3", "d1")
    service.managed.resolution.reconfigure(ResolverSettings())
    assert not await service.resolve("third")


async def test_first_requests_at_the_same_time_look_once(service: Service) -> None:
    gate = service.store.gates["hub/sql"] = asyncio.Event()
    service.store.contents["hub/sql"] = "d1"
    asking = [asyncio.create_task(service.resolve("sql")) for _ in range(20)]
    while not service.store.loads:
        await asyncio.sleep(0.001)
    asking[0].cancel()
    gate.set()
    assert await asyncio.gather(*asking[1:]) == [True] * 19, "the first to ask has left, and is not waited for"
    assert (service.hub.asked, service.store.loads) == (["sql"], ["hub/sql"])


async def test_an_adapter_that_cannot_be_read_says_why_and_is_not_read_again_for_a_while(service: Service) -> None:
    service.store.contents["hub/bad"] = AdapterFormatError("no weights")
    assert str(await fails(service.resolve("bad"))) == "no weights"
    assert isinstance(await fails(service.resolve("bad")), AdapterQuarantined)
    assert len(service.store.loads) == 1
    service.clock.now_s += 6
    service.store.contents["hub/bad"] = "d1"
    assert await service.resolve("bad")


async def test_a_store_that_is_not_ready_is_asked_again_at_once(service: Service) -> None:
    service.store.contents["hub/sql"] = NotReady("later")
    assert isinstance(await fails(service.resolve("sql")), NotReady)
    service.store.contents["hub/sql"] = "d1"
    assert await service.resolve("sql")


async def test_a_resolver_that_hangs_is_a_source_error(service: Service) -> None:
    gate = threading.Event()

    class Hangs:
        def source(self, name: str, tenant_id: str) -> str | None:  # noqa: ARG002
            gate.wait()
            return None

    service.managed.resolution.reconfigure(ResolverSettings([Hangs()], timeout_s=0.01))
    error = await fails(service.resolve("sql"))
    gate.set()
    assert isinstance(error, SourceError)
    assert "source_timeout_s" in str(error)


async def test_a_tenant_whose_names_hang_takes_its_own_threads_only(service: Service) -> None:
    gate, hung = threading.Event(), threading.Semaphore(0)

    class HangsForOne(In):
        def source(self, name: str, tenant_id: str) -> str | None:
            if tenant_id == "slow":
                hung.release()
                gate.wait()
            return super().source(name, tenant_id)

    place = HangsForOne("hub")
    service.managed.resolution.reconfigure(ResolverSettings([place], timeout_s=60.0))
    names = [f"n{index}" for index in range(2 * MAX_LOOKUPS)]
    waiting = [asyncio.ensure_future(service.resolve(name, "slow")) for name in names]
    try:
        for _ in range(MAX_LOOKUPS_PER_TENANT):
            await asyncio.to_thread(hung.acquire)
        service.store.contents["hub/sql"] = "d1"
        assert await service.resolve("sql")
        assert not hung.acquire(blocking=False), "no more of its names are looked for at a time"
    finally:
        gate.set()
    assert not any(await asyncio.gather(*waiting))
    assert sorted(place.asked) == sorted([*names, "sql"]), "and all are, in the end"


async def test_what_a_tenant_unloaded_stays_so(service: Service) -> None:
    service.store.contents["hub/sql"] = "d1"
    assert await service.resolve("sql")
    unload, _ = await service.managed.client.begin_unload("sql", **ADA)
    assert not await service.resolve("sql"), "it drains"
    await service.managed.client.end_unload(unload)
    service.clock.now_s += 60
    assert not await service.resolve("sql")


async def test_a_load_that_somebody_asked_for_comes_first(service: Service) -> None:
    gate = service.store.gates["theirs"] = asyncio.Event()
    service.store.contents |= {"hub/sql": "d1", "theirs": "d2"}
    await service.managed.client.load(wanted("sql", "theirs"))
    assert not await service.resolve("sql")
    gate.set()
    await service.managed.client.load_and_wait(wanted("sql", "theirs"))
    assert service.meaning("sql") == "d2"


async def test_a_load_that_is_asked_for_while_a_name_is_read_comes_first(service: Service) -> None:
    read, gate = (service.store.gates.setdefault(source, asyncio.Event()) for source in ("hub/sql", "theirs"))
    service.store.contents |= {"hub/sql": "d1", "theirs": "d2"}
    resolving = asyncio.create_task(service.resolve("sql"))
    while not service.store.loads:
        await asyncio.sleep(0.001)
    await service.managed.client.load(wanted("sql", "theirs"))
    read.set()
    assert not await resolving
    gate.set()


async def test_a_load_that_failed_leaves_the_name_to_be_found(service: Service) -> None:
    assert await fails(service.managed.client.load_and_wait(wanted("sql", "nowhere")))
    service.store.contents["hub/sql"] = "d1"
    assert await service.resolve("sql")


async def test_aliases_and_reserved_names_are_not_looked_for(service: Service) -> None:
    await service.managed.client.put_alias("app", {"base": 1.0}, **ADA)
    for name in ("app", "base", "auto", "..", "a//b", ""):
        assert not await service.resolve(name), name
    assert service.hub.asked == []


async def test_the_quota_of_a_project_counts_what_was_found(service: Service) -> None:
    project = await service.managed.tenants_client.create_project("acme", actor="test")
    await service.managed.tenants_client.configure_project(project.id, {"max_adapters": 1}, actor="test")
    service.store.contents |= {"hub/a": "d1", "hub/b": "d2"}
    assert await service.resolve("a", project.id)
    assert "may have 1" in str(await fails(service.resolve("b", project.id)))
    other = replace(wanted("c", "hub/b"), tenant_id=project.id)
    assert "may have 1" in str(await fails(service.managed.client.load_and_wait(other))), "as when it is loaded"
