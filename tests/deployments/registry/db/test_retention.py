"""What is forgotten: too much of one name, too much of all, too old; never another's history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.deployments.registry.db import retention
from app.deployments.registry.db.retention import Limits, trim
from app.deployments.registry.event_log import NewEvent, record_audit, record_events
from app.deployments.registry.models import DEFAULT_TENANT, State
from app.deployments.registry.registry import Registry
from tests.deployments.managed import ADA, MINE, register, wanted

DAY_S = 86_400.0


@pytest.fixture
def now_s() -> list[float]:
    return [100 * DAY_S]


@pytest.fixture
def registry(open_again: Callable[..., Registry], now_s: list[float]) -> Registry:
    return open_again(clock=lambda: now_s[0])


def add_events(registry: Registry, name: str, number: int) -> None:
    with registry.database.write() as connection:
        news = [NewEvent(f"{name}{index}", name, DEFAULT_TENANT) for index in range(number)]
        record_events(connection, registry.database, news)


def test_a_busy_name_erases_nobody_elses_history(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "EVENTS", Limits(per_name=5, total=1000, age_s=DAY_S))
    monkeypatch.setattr(retention, "_DELETE_BATCH", 3)
    add_events(registry, "quiet", 2)
    add_events(registry, "busy", 40)
    assert trim(registry.database) == 35
    assert [item.event for item in registry.event_log.events("busy", **MINE)] == [
        f"busy{index}" for index in range(39, 34, -1)
    ]
    assert [item.event for item in registry.event_log.events("quiet", **MINE)] == ["quiet1", "quiet0"]
    assert trim(registry.database) == 0


def test_what_is_old_goes_and_so_does_what_is_too_much(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, now_s: list[float]
) -> None:
    for table in ("EVENTS", "AUDIT"):
        monkeypatch.setattr(retention, table, Limits(per_name=50, total=6, age_s=DAY_S))
    add_events(registry, "old", 2)
    with registry.database.write() as connection:
        record_audit(connection, registry.database, "ada", "load", "old", DEFAULT_TENANT, {})
    now_s[0] += DAY_S + 1
    for name in ("a", "b", "c"):
        add_events(registry, name, 3)
    with registry.database.write() as connection:
        record_audit(connection, registry.database, "ada", "load", "new", DEFAULT_TENANT, {})
    trim(registry.database)
    assert [item.event for item in registry.event_log.events(**MINE)] == ["c2", "c1", "c0", "b2", "b1", "b0"]
    assert [item.name for item in registry.event_log.audit(**MINE)] == ["new"]


def add_audit(registry: Registry, tenant_id: str, number: int) -> None:
    with registry.database.write() as connection:
        for index in range(number):
            record_audit(connection, registry.database, tenant_id, "register", f"n{index}", tenant_id, {})


def num_audit(registry: Registry) -> dict[str, int]:
    tenants = (DEFAULT_TENANT, "quiet", "one", "two")
    return {name: len(registry.event_log.audit(limit=1000, before=None, tenant_id=name)) for name in tenants}


def test_a_tenant_s_flood_displaces_neither_others_history_nor_the_operator_s(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "AUDIT", Limits(per_name=10, total=100, age_s=DAY_S, per_tenant=80))
    add_audit(registry, DEFAULT_TENANT, 90)
    add_audit(registry, "quiet", 5)
    add_audit(registry, "one", 300)
    trim(registry.database)
    assert num_audit(registry) == {DEFAULT_TENANT: 90, "quiet": 5, "one": 80, "two": 0}
    add_audit(registry, "two", 300)
    trim(registry.database)
    left = num_audit(registry)
    assert (left[DEFAULT_TENANT], left["quiet"]) == (90, 5)
    assert left["one"] + left["two"] == 95, "those with the most rows lose the oldest"
    assert abs(left["one"] - left["two"]) <= 1
    add_audit(registry, DEFAULT_TENANT, 30)
    trim(registry.database)
    assert num_audit(registry) == left | {DEFAULT_TENANT: 100}


def test_jobs_of_names_that_never_were_go_and_no_others(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, now_s: list[float]
) -> None:
    monkeypatch.setattr(retention, "UNKNOWN_JOBS", Limits(per_name=20, total=3, age_s=DAY_S))
    register(registry.catalog, "real", "/", "d", max_rank=1, size_bytes=1, **ADA)
    storage = registry.jobs.advance(registry.jobs.create(wanted("real", "/a")), State.FAILED)
    unfinished = registry.jobs.create(wanted("tried", "/a"))
    failed = [
        registry.jobs.advance(registry.jobs.create(wanted(f"guess{index}", "/a")), State.FAILED) for index in range(8)
    ]
    trim(registry.database)
    assert [registry.jobs.get(job.id, **MINE) is not None for job in failed] == [False] * 5 + [True] * 3
    now_s[0] += DAY_S + 1
    trim(registry.database)
    assert not any(registry.jobs.get(job.id, **MINE) for job in failed)
    assert registry.jobs.get(storage.id, **MINE) == storage
    assert registry.jobs.unfinished_jobs("load") == [unfinished]


def test_another_base_models_registry_keeps_its_own(shared_url: str, registry: Registry) -> None:
    other = Registry(shared_url, "other-" + registry.database.base_digest[:20])
    add_events(other, "old", 3)
    with other.database.read():
        pass
    trim(registry.database)
    assert len(other.event_log.events("old", **MINE)) == 3
    other.close()
