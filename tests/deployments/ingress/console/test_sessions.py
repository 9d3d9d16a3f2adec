"""Sign-in: who the caller is, and the cookie that stands for a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import httpx
import pytest
import pytest_asyncio
from starlette.requests import HTTPConnection

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.middleware.sessions import (
    COOKIE,
    ENVIRONMENT_KEY,
    ConsoleSessions,
    Session,
)
from app.deployments.tenancy.auth.key_crypto import key_digest
from app.deployments.tenancy.auth.tenant_mirror import TenantMirror
from app.engine.errors import NotReady
from tests.deployments.http_service import Service

CONSOLE = {"X-Polylora-Console": "1"}
ENVIRONMENT_ADMIN = "sk-admin-poly-" + "x1Y2z3" * 7 + "q"


class Keys(NamedTuple):
    admin: str
    admin_id: str
    project: str
    project_id: str


@pytest_asyncio.fixture
async def keys(service: Service) -> Keys:
    tenants = service.managed.tenants_client
    admin = await tenants.create_admin_key("first", None, actor="test")
    project = await tenants.create_project("atlas", actor="test")
    _, issued = await tenants.create_account(project.id, "app", with_key=True, expires_in_s=None, actor="test")
    assert issued is not None
    return Keys(admin.value, admin.key.id, issued.value, project.id)


@pytest_asyncio.fixture
async def client(service: Service, keys: Keys) -> AsyncIterator[httpx.AsyncClient]:  # noqa: ARG001
    policy = HttpPolicy(admin_digest=key_digest(ENVIRONMENT_ADMIN))
    transport = httpx.ASGITransport(make_app(service, policy), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=CONSOLE) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_without_keys_this_machine_needs_none(http: httpx.AsyncClient) -> None:
    body = (await http.get("/v1/session")).json()
    assert (body["kind"], body["project_id"], body["model"]) == ("open", None, "base")


async def test_who_the_caller_is(client: httpx.AsyncClient, keys: Keys) -> None:
    assert (await client.get("/v1/session")).status_code == 401
    admin = (await client.get("/v1/session", headers=bearer(keys.admin))).json()
    assert (admin["kind"], admin["project_id"], admin["role"]) == ("admin", None, None)
    project = (await client.get("/v1/session", headers=bearer(keys.project))).json()
    assert (project["kind"], project["project_id"], project["project_name"]) == ("project", keys.project_id, "atlas")
    assert project["role"] == "member"


@pytest.mark.parametrize("who", ["admin", "project", "environment"])
async def test_a_cookie_stands_for_the_key(client: httpx.AsyncClient, keys: Keys, who: str) -> None:
    key = {"admin": keys.admin, "project": keys.project, "environment": ENVIRONMENT_ADMIN}[who]
    answer = await client.post("/v1/session", headers=bearer(key), json={"expires_in_seconds": 600})
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict", "Max-Age=600", "Path=/"):
        assert part in cookie
    assert key not in cookie
    assert key_digest(key) not in cookie
    kind = "project" if who == "project" else "admin"
    assert (await client.get("/v1/session")).json()["kind"] == kind
    assert (await client.get("/v1/loras")).status_code == 200
    assert (await client.get("/v1/organization/projects")).status_code == (200 if kind == "admin" else 403)
    gone = await client.delete("/v1/session")
    assert "Max-Age=0" in gone.headers["set-cookie"]
    assert (await client.get("/v1/session")).status_code == 401


async def test_a_cookie_is_secure_where_the_page_is(client: httpx.AsyncClient, keys: Keys) -> None:
    plain = await client.post("/v1/session", headers=bearer(keys.admin))
    assert "Secure" not in plain.headers["set-cookie"]
    proxied = await client.post("/v1/session", headers=bearer(keys.admin) | {"X-Forwarded-Proto": "https"})
    assert "Secure" in proxied.headers["set-cookie"]


async def test_a_cookie_counts_only_with_the_header_of_the_console(client: httpx.AsyncClient, keys: Keys) -> None:
    await client.post("/v1/session", headers=bearer(keys.admin))
    assert (await client.get("/v1/loras")).status_code == 200
    del client.headers["X-Polylora-Console"]
    assert (await client.get("/v1/loras")).status_code == 401
    assert (await client.delete("/v1/loras/sql")).status_code == 401


async def test_a_changed_or_ended_cookie_is_refused(client: httpx.AsyncClient, keys: Keys, service: Service) -> None:
    await client.post("/v1/session", headers=bearer(keys.project), json={"expires_in_seconds": 600})
    key_id, expires, mac = client.cookies["polylora_session"].split(".")
    client.cookies.clear()
    forged = [
        f"{keys.admin_id}.{expires}.{mac}", f"{key_id}.{int(expires) + 9999}.{mac}", f"{key_id}.{expires}.{'0' * 64}",
        f"key_environment.{expires}.{mac}", f"{key_id}.{expires}", "",
    ]  # fmt: skip
    for value in forged:
        refused = await client.get("/v1/loras", headers={"Cookie": f"polylora_session={value}"})
        assert refused.status_code == 401, value
    good = {"Cookie": f"polylora_session={key_id}.{expires}.{mac}"}
    assert (await client.get("/v1/loras", headers=good)).status_code == 200
    service.accounting.clock = lambda: float(expires)
    transport = httpx.ASGITransport(make_app(service, HttpPolicy()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=CONSOLE) as later:
        assert (await later.get("/v1/loras", headers=good)).status_code == 401


async def test_a_session_ends_with_its_key(client: httpx.AsyncClient, keys: Keys, service: Service) -> None:
    await client.post("/v1/session", headers=bearer(keys.admin))
    await service.managed.tenants_client.revoke_key(None, keys.admin_id, actor="test")
    assert (await client.get("/v1/loras")).status_code == 401


async def test_signing_out_removes_a_cookie_that_has_ended(client: httpx.AsyncClient, keys: Keys) -> None:
    client.cookies.set(COOKIE, f"{keys.admin_id}.1.{'0' * 64}")
    gone = await client.delete("/v1/session")
    assert gone.status_code == 204
    assert f'{COOKIE}=""; ' in gone.headers["set-cookie"]


async def test_the_use_of_a_session_is_a_use_of_its_key(
    client: httpx.AsyncClient, keys: Keys, service: Service
) -> None:
    await client.post("/v1/session", headers=bearer(keys.admin))
    service.accounting._key_used_s.clear()
    assert (await client.get("/v1/loras")).status_code == 200
    assert [*service.accounting._key_used_s] == [keys.admin_id]


async def test_a_session_cannot_outlive_a_week(client: httpx.AsyncClient, keys: Keys) -> None:
    answer = await client.post("/v1/session", headers=bearer(keys.admin), json={"expires_in_seconds": 8 * 86_400})
    assert answer.status_code == 400


async def test_a_key_starts_a_session_where_an_old_one_has_ended(client: httpx.AsyncClient, keys: Keys) -> None:
    client.cookies.set(COOKIE, f"{keys.admin_id}.9999999999.{'0' * 64}")
    assert (await client.get("/v1/session")).status_code == 401
    assert (await client.get("/v1/session", headers=bearer(keys.admin))).status_code == 200
    assert (await client.post("/v1/session", json={}, headers=bearer(keys.admin))).status_code == 200


async def test_a_session_does_not_renew_itself(client: httpx.AsyncClient, keys: Keys) -> None:
    started = await client.post("/v1/session", json={}, headers=bearer(keys.admin))
    assert started.status_code == 200
    assert (await client.get("/v1/session")).json()["kind"] == "admin"
    renewed = await client.post("/v1/session", json={})
    assert renewed.status_code == 403, renewed.text
    assert "set-cookie" not in renewed.headers


async def test_a_forged_cookie_ends_no_session_while_the_store_is_away() -> None:
    clock, secrets = 0.0, [b"secret"]

    async def fetch() -> bytes:
        if not secrets:
            raise NotReady("the store restarts")
        return secrets.pop()

    sessions = ConsoleSessions(fetch, TenantMirror(), lambda: clock, "digest of the admin's")
    cookie = await sessions.cookie(Session(ENVIRONMENT_KEY, 1000))

    def connection(value: str) -> HTTPConnection:
        headers = [(b"cookie", f"{COOKIE}={value}".encode()), (b"x-polylora-console", b"1")]
        return HTTPConnection({"type": "http", "headers": headers})

    clock = 100.0
    with pytest.raises(NotReady):
        await sessions.of(connection(f"{ENVIRONMENT_KEY}.1000.{'0' * 64}"))
    assert await sessions.of(connection(cookie)) == Session(ENVIRONMENT_KEY, 1000)
