"""The owner of tenants: what it publishes, who else may change it, and 100,000 keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select, text, update

from app.config import SECRETS_KEY
from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.registry.db.database import Database, sqlite_url
from app.deployments.registry.db.tenant_tables import api_keys, projects
from app.deployments.rpc.actor_proxy import actor_proxy
from app.deployments.rpc.long_poll_host import Changes, Version
from app.deployments.tenancy.auth import api_key_store, project_store
from app.deployments.tenancy.auth.key_crypto import derived_salt, is_key, key_digest, new_key
from app.deployments.tenancy.auth.project_store import ProjectStore
from app.deployments.tenancy.auth.tenant_mirror import TenantMirror
from app.deployments.tenancy.models import UNLIMITED, ApiKey, Tenant, TenantKey, TenantRow
from app.deployments.tenancy.quota.leases import LeaseRequest
from app.deployments.tenancy.quota.limits import NANOS_PER_CENT, LimitKey
from app.deployments.tenancy.quota.rate_limiter import IDLE_RETURN_S
from app.deployments.tenancy.service import TenantsService
from app.deployments.tenancy.tenant_store import TenantChanges, TenantStore
from app.deployments.tenancy.usage.flusher import LedgerKey, Row, UsageRecord
from app.engine.errors import ConfigError, InvalidRequest, NotReady
from tests.deployments.http_service import RATES
from tests.deployments.managed import Here


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(sqlite_url(tmp_path / "registry.sqlite"), "base", Clock())
    yield database
    database.close()


async def caught_up(service: TenantsService, view: TenantMirror, held: Version | None = None) -> Version | None:
    while (news := await service.watch(held, "ingress", 0.0)) is not None:
        held, changes = news
        view.take(changes)
    return held


async def test_what_a_call_changes_is_published(database: Database) -> None:
    service, view = TenantsService(TenantStore(database), lambda: None), TenantMirror()
    held = await caught_up(service, view)
    assert not view.has_keys
    project = await service.create_project("acme", actor="test")
    _, issued = await service.create_account(project.id, "app", with_key=True, expires_in_s=None, actor="test")
    assert issued is not None
    held = await caught_up(service, view, held)
    known = view.find(issued.value, 0.0)
    assert known is not None
    assert known.tenant == project
    await service.configure_project(project.id, {"weight": 2.0}, actor="test")
    held = await caught_up(service, view, held)
    tenant = view.tenant(project.id)
    assert tenant is not None
    assert tenant.weight == 2.0
    await service.revoke_key(project.id, issued.key.id, actor="test")
    await caught_up(service, view, held)
    assert view.find(issued.value, 0.0) is None
    assert view.has_keys


def test_a_hub_token_is_encrypted_for_its_project_by_a_key_that_may_change(database: Database) -> None:
    key = {SECRETS_KEY: "0123456789abcdef" * 3 + "9f"}
    store = ProjectStore(database, key)
    ada, bob = (store.create(name, actor="test").id for name in ("ada", "bob"))
    store.configure(ada, {"hub_token": "hf_adas"}, actor="test")
    store.configure(bob, {"hub_token": "hf_bobs"}, actor="test")
    assert (store.hub_token(ada), store.hub_token(bob), store.hub_token("default")) == ("hf_adas", "hf_bobs", None)
    with database.read() as connection:
        stored = dict(connection.execute(select(projects.c.id, projects.c.hub_token)).all())
        written = "".join(map(str, connection.execute(text("SELECT * FROM tenant_audit")).all()))
    assert "hf_" not in written + "".join(map(str, stored.values()))
    for environ in ({}, {SECRETS_KEY: "fedcba9876543210" * 3 + "9f"}):
        with pytest.raises(NotReady, match=SECRETS_KEY):
            ProjectStore(database, environ).hub_token(ada)
    with pytest.raises(ConfigError, match="could be guessed"):
        ProjectStore(database, {SECRETS_KEY: "a" * 64})
    with database.write() as connection:  # whoever writes to the database gives a project no other's token
        connection.execute(update(projects).where(projects.c.id == bob).values(hub_token=stored[ada]))
    with pytest.raises(NotReady):
        store.hub_token(bob)
    store.configure(ada, {"hub_token": None}, actor="test")
    assert store.hub_token(ada) is None


async def test_what_another_process_changes_is_seen(database: Database) -> None:
    """A shell that makes the first key, or a second service on the same database."""
    service, view = TenantsService(TenantStore(database), lambda: None), TenantMirror()
    held = await caught_up(service, view)
    elsewhere = TenantStore(database)
    made = elsewhere.keys.create_admin_key("first", None, actor="shell")
    project = await service.create_project("acme", actor="test")  # any call that changes something sees all
    await caught_up(service, view, held)
    known = view.find(made.value, 0.0)
    assert known is not None
    assert known.key.is_admin
    assert view.tenant(project.id) is not None


async def test_of_a_hundred_thousand_keys_what_another_process_changed_is_read(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = TenantStore(database)
    project = elsewhere.projects.create("acme", actor="shell")
    account, _ = elsewhere.keys.create_account(project.id, "app", with_key=True, expires_in_s=None, actor="shell")
    _add_keys(database, 100_000)
    service, view = TenantsService(TenantStore(database), lambda: None), TenantMirror()
    held = await caught_up(service, view)
    read: list[str] = []
    for books, name in ((api_key_store, "_key"), (project_store, "_tenant")):
        made = getattr(books, name)
        monkeypatch.setattr(books, name, lambda row, *more, made=made: (read.append(row["id"]), made(row, *more))[1])
    made = elsewhere.keys.create_key(project.id, account.id, "next", None, actor="shell")
    renamed = elsewhere.projects.rename(project.id, "other", actor="shell")
    read.clear()
    other = await service.create_project("here", actor="test")  # any call that changes something sees all
    assert sorted(read) == sorted([other.id, other.id, project.id, made.key.id]), "the first: what the call returns"
    await caught_up(service, view, held)
    assert view.tenant(project.id) == renamed
    assert view.find(made.value, 0.0) is not None
    with database.read() as connection:
        for table in ("api_keys", "projects"):
            plan = f"EXPLAIN QUERY PLAN SELECT * FROM {table} WHERE base_digest = 'base' AND revision > 3"
            (line,) = connection.execute(text(plan)).all()
            assert f"SEARCH {table} USING INDEX {table}_by_revision" in line[-1], "no row is read that has not changed"


def _add_keys(database: Database, count: int) -> None:
    """So many more, as if made with the one key that there is."""
    with database.write() as connection:
        row = connection.execute(select(api_keys)).mappings().one()
        rows = [{**row, "id": f"key_{number}", "digest": f"{number:064x}"} for number in range(count)]
        connection.execute(insert(api_keys), rows)


def test_every_change_is_news(database: Database) -> None:
    """What is read after each is what there is then, and little of it."""
    elsewhere, books = TenantStore(database), TenantStore(database)
    first, second = (elsewhere.projects.create(name, actor="shell") for name in ("acme", "other"))
    account, issued = elsewhere.keys.create_account(first.id, "app", with_key=True, expires_in_s=None, actor="shell")
    assert issued is not None
    next_key = elsewhere.keys.create_key(first.id, account.id, "next", None, actor="shell")
    changes: list[Callable[[], object]] = [
        lambda: elsewhere.projects.configure(first.id, {"weight": 2.0}, actor="shell"),
        lambda: elsewhere.projects.limit_rates(first.id, "tiny", {"requests_per_min": 5}, actor="shell"),
        lambda: elsewhere.projects.limit_rates(first.id, "tiny", {"requests_per_min": UNLIMITED}, actor="shell"),
        lambda: elsewhere.projects.limit_spend(first.id, 100, actor="shell"),
        lambda: elsewhere.projects.permit_models(first.id, "allow_list", ["tiny"], actor="shell"),
        lambda: elsewhere.projects.rotate_salt(first.id, actor="shell"),
        lambda: elsewhere.projects.share(first.id, "sql", [second.id], actor="shell"),
        lambda: elsewhere.projects.share(first.id, "sql", [], actor="shell"),
        lambda: elsewhere.keys.expire_key(first.id, issued.key.id, 60, actor="shell"),
        lambda: elsewhere.keys.revoke_key(first.id, issued.key.id, actor="shell"),
        lambda: elsewhere.keys.delete_account(first.id, account.id, actor="shell"),
        lambda: elsewhere.keys.create_admin_key("first", None, actor="shell"),
        lambda: elsewhere.projects.archive(first.id, actor="shell"),
    ]
    known = books.since(0)
    tenants, keys = ({row.id: row for row in rows} for rows in (known.tenants, known.keys))
    for number, change in enumerate(changes):
        change()
        news = books.since(known.revision)
        assert news.revision == known.revision + 1
        assert 1 <= len(news.tenants) + len(news.keys) <= 2, number
        tenants |= {tenant.id: tenant for tenant in news.tenants}
        keys |= {key.id: key for key in news.keys}
        known = books.since(0)
        assert tenants == {tenant.id: tenant for tenant in known.tenants}, number
        assert keys == {key.id: key for key in known.keys}, number
    assert keys[next_key.key.id].revoked_s is not None, "with its account"
    assert books.since(known.revision) == TenantChanges(known.revision, [], [])
    assert len(books.since(known.revision + 9).keys) == len(keys), "the database is an older copy than what was seen"


async def owner_of_a_project(database: Database, wall: Clock, passed: Clock) -> tuple[TenantsService, str]:
    """The owner with a project in its table. `wall` may be set; `passed` goes on."""
    service = TenantsService(TenantStore(database), lambda: None, wall, monotonic=passed)
    await caught_up(service, TenantMirror())
    return service, (await service.create_project("acme", actor="test")).id


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_clock_that_is_set_neither_refuses_for_long_nor_lends_a_limit_twice(
    database: Database, step_s: float
) -> None:
    wall, passed = Clock(), Clock()
    service, project_id = await owner_of_a_project(database, wall, passed)
    await service.limit_rates(project_id, "base", {"requests_per_min": 10}, actor="test")
    wants = [LeaseRequest(LimitKey(project_id, "requests", "base"), 1, 1)]

    async def num_lent() -> int:
        return sum([(await service.lease("ingress", wants))[0].granted for _ in range(30)])

    assert await num_lent() == 10
    wall.now_s += step_s
    assert await num_lent() == 0, "nothing is refilled by that"
    for clock in (wall, passed):
        clock.now_s += 30.0
    assert await num_lent() == 5


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_what_an_ingress_does_not_need_goes_back_though_its_clock_is_set(
    database: Database, step_s: float
) -> None:
    wall, passed = Clock(), Clock()
    service, project_id = await owner_of_a_project(database, wall, passed)
    tenant = await service.limit_rates(project_id, "base", {"requests_per_day": 1000}, actor="test")
    owner, rates = actor_proxy(TenantsService, Here(service)), RATES
    tenancy = RequestAccounting(TenantMirror(), owner, rates, "ingress", wall, monotonic=passed)
    await tenancy.limiter.reserve(tenant, {LimitKey(project_id, "day", "base"): 1})
    assert (await service.remaining(project_id))[0][2] < 999, "it holds some more than it needs"
    wall.now_s += step_s
    await tenancy.limiter.report()
    assert (await service.remaining(project_id))[0][2] < 999, "no time has passed"
    passed.now_s += IDLE_RETURN_S
    await tenancy.limiter.report()
    assert (await service.remaining(project_id))[0][2] == 999
    await tenancy.close()


def spent(project_id: str, nanos: int) -> list[Row]:
    return [(LedgerKey(1, project_id, "k", "base", "", "completions"), UsageRecord(cost_nanos=nanos))]


async def test_a_clock_that_is_set_to_another_month_and_back_lends_no_money_twice(database: Database) -> None:
    wall, passed = Clock(), Clock()
    service, project_id = await owner_of_a_project(database, wall, passed)
    await service.limit_spend(project_id, 1, actor="test")
    most = NANOS_PER_CENT - 1_000_000

    async def num_lent(used: int) -> int:
        want = LeaseRequest(LimitKey(project_id, "spend"), most, most, used=used)
        return (await service.lease("ingress", [want]))[0].granted

    assert await num_lent(0) >= most
    await service.record("ingress", 1, spent(project_id, most))
    assert await num_lent(most) == 0
    for step_s in (40 * 86_400.0, -40 * 86_400.0):
        wall.now_s += step_s
        assert await num_lent(most) == 0
    for clock in (wall, passed):
        clock.now_s += 40 * 86_400.0
    assert await num_lent(most) >= most, "a month has passed"


async def test_money_counts_what_was_spent_before_its_limit_came(database: Database) -> None:
    service, project_id = await owner_of_a_project(database, Clock(), Clock())
    assert await service.remaining(project_id) == []
    await service.record("ingress", 1, spent(project_id, NANOS_PER_CENT - 1))
    await service.limit_spend(project_id, 1, actor="test")
    assert await service.remaining(project_id) == [(LimitKey(project_id, "spend"), NANOS_PER_CENT, 1)]


@pytest.mark.parametrize("how", ["it has no limit", "its limit is not enforced"])
async def test_money_counts_what_was_spent_while_nothing_counted_it(database: Database, how: str) -> None:
    service, project_id = await owner_of_a_project(database, Clock(), Clock())
    spend = LimitKey(project_id, "spend")
    await service.limit_spend(project_id, 1, actor="test")
    assert await service.remaining(project_id) == [(spend, NANOS_PER_CENT, NANOS_PER_CENT)]
    if how == "it has no limit":
        await service.limit_spend(project_id, None, actor="test")
    else:
        await service.configure_project(project_id, {"enforce": False}, actor="test")
    await service.record("ingress", 1, spent(project_id, 5 * NANOS_PER_CENT))
    await service.limit_spend(project_id, 6, actor="test")
    if how != "it has no limit":
        await service.configure_project(project_id, {"enforce": True}, actor="test")
    assert await service.remaining(project_id) == [(spend, 6 * NANOS_PER_CENT, NANOS_PER_CENT)]


async def test_a_project_s_spend_is_read_once_for_all_who_wait_for_it_and_by_an_index(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, project_id = await owner_of_a_project(database, Clock(), Clock())
    await service.limit_spend(project_id, 1, actor="test")
    ledger, statements = service._store.ledger, list[str]()
    read = ledger.project_spend

    def slow(project_id: str, now_s: float) -> int:
        statements.append(project_id)
        time.sleep(0.05)
        return read(project_id, now_s)

    monkeypatch.setattr(ledger, "project_spend", slow)
    await asyncio.gather(*(service.remaining(project_id) for _ in range(20)))
    assert statements == [project_id]
    with database.read() as connection:
        plan = connection.exec_driver_sql(
            "EXPLAIN QUERY PLAN SELECT sum(cost_nanos) FROM ledger WHERE base_digest = 'base' AND minute >= 5 "
            "AND project_id IN ('a', 'b') GROUP BY project_id"
        ).all()
    assert "ledger_by_project" in str(plan)


def test_a_new_copy_forgets_what_is_no_more() -> None:
    view = TenantMirror()
    old, new = (ApiKey(f"key_{name}", name, "", name, 0.0, "proj") for name in ("old", "new"))
    rows: list[tuple[TenantKey, TenantRow]] = [(("key", "old"), old), (("tenant", "proj"), Tenant("proj", "p", 0.0))]
    view.take(Changes(tuple(rows), is_first=True, is_last=True))
    view.take(Changes(((("key", "new"), new),), is_first=True, is_last=False))
    assert view.tenant("proj") is not None, "it may be yet to come"
    view.take(Changes((), is_first=False, is_last=True))
    assert view.tenant("proj") is None
    assert set(view._keys) == {"new"}


def test_a_hundred_thousand_keys_are_looked_up_in_microseconds() -> None:
    view = TenantMirror()
    rows: list[tuple[TenantKey, TenantRow]] = [(("tenant", "proj"), Tenant("proj", "p", 0.0))]
    values = [new_key(is_admin=False).value for _ in range(100_000)]
    rows += [
        (("key", key_digest(value)), ApiKey(f"key_{index}", key_digest(value), "", "k", 0.0, "proj"))
        for index, value in enumerate(values)
    ]
    view.take(Changes(tuple(rows), is_first=True, is_last=True))
    started_s = time.process_time()
    assert all(view.find(value, 1.0) is not None for value in values[:20_000])
    per_look_up_s = (time.process_time() - started_s) / 20_000
    assert per_look_up_s < 50e-6


def test_keys_and_salts() -> None:
    made = {new_key(is_admin=False).value for _ in range(100)}
    assert len(made) == 100
    assert all(is_key(value) and len(value) == 51 for value in made)
    assert not any(is_key(value) for value in ("", "sk-poly-", "sk-poly-short", "sk-proj-" + 43 * "a"))
    salts = {derived_salt(secret, version) for secret in (b"a", b"b") for version in (1, 2)}
    assert len(salts) == 4


def test_limits_that_cannot_be_are_refused(database: Database) -> None:
    projects = TenantStore(database).projects
    project = projects.create("acme", actor="test")
    with pytest.raises(InvalidRequest, match="weight"):
        projects.configure(project.id, {"weight": float("nan")}, actor="test")
    with pytest.raises(InvalidRequest, match="max_concurrent"):
        projects.configure(project.id, {"max_concurrent": -1}, actor="test")
    with pytest.raises(InvalidRequest, match="no setting"):
        projects.configure(project.id, {"salt": "mine"}, actor="test")
    with pytest.raises(InvalidRequest, match="name"):
        projects.permit_models(project.id, "allow_list", ["../etc"], actor="test")


def test_the_secret_of_a_project_leaves_the_database_as_a_salt_only(database: Database) -> None:
    project = TenantStore(database).projects.create("acme", actor="test")
    with database.read() as connection:
        secret = str(connection.exec_driver_sql("SELECT salt_secret FROM projects").scalar())
    assert secret not in repr(project)
    assert project.salt == derived_salt(bytes.fromhex(secret), 1)
