"""Metering: what a request costs its caller before its body is parsed, and how long its body may take."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.deployments.ingress.error_responses import BodyTimeout
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware import metering
from app.deployments.ingress.http.middleware.metering import MAX_SLOW_BODIES, _Body, _Payer
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.openapi import api_routes
from app.deployments.tenancy.models import RateLimit, TenantLimits
from app.engine.errors import QueueFull
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.middleware.test_auth import CHAT, Org, bearer, org
from tests.deployments.ingress.http.middleware.test_origin_check import client_of

__all__ = ["org"]


async def limit(org: Org, *, calls: int | None = None, requests: int | None = None) -> None:
    owner = org.service.accounting.tenants_service
    if calls is not None:
        await owner.configure_project(org.ids["ada"], {"calls_per_min": calls}, actor="test")
    if requests is not None:
        await owner.limit_rates(org.ids["ada"], "base", {"requests_per_min": requests}, actor="test")


async def test_refused_requests_take_from_the_requests_per_minute(org: Org) -> None:
    await limit(org, requests=4)
    await org.service.accounting.tenants_service.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    path, headers = "/v1/chat/completions", {"Content-Type": "application/json"}
    bodies = [b"no JSON", json.dumps(CHAT | {"model": "nobody"}), json.dumps(CHAT | {"n": -1}), b"[" * 30_000]
    answers = [await org.ask("ada", "POST", path, content=body, headers=headers) for body in (*bodies, b"no JSON")]
    assert [each.status_code for each in answers] == [400, 404, 400, 413, 429]
    assert answers[-1].headers["x-ratelimit-remaining-requests"] == "0"
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert org.service.observed[-1] == ("chat", 429)
    assert (await org.ask("bob", "POST", path, json=CHAT)).status_code == 200


async def test_every_route_is_counted_before_its_body_is_read(org: Org) -> None:
    await limit(org, calls=0, requests=0)
    app = make_app(org.service, HttpPolicy())
    open_paths = {"/health", "/readyz", "/livez"}
    sign_out = ("/v1/session", "DELETE")  # reads no body and only removes a cookie, for anyone

    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    routes = [(path, method) for path, methods in _routes(app) for method in methods if path not in open_paths]
    assert len(routes) > 50
    routes.remove(sign_out)
    for path, method in routes:
        body = {"content": unread()} if method in ("POST", "PUT", "PATCH") else {}
        answer = await org.ask("ada", method, path.replace("{", "").replace("}", ""), **body)
        assert answer.status_code == 429, (path, method, answer.text)


def _routes(app: Any) -> list[tuple[str, set[str]]]:
    return [(route.path_format, set(route.methods)) for route in api_routes(app.routes)]


async def test_bytes_of_bodies_cost_calls(org: Org) -> None:
    await limit(org, calls=100)
    org.service.preprocessor.limits = org.service.preprocessor.limits.model_copy(update={"max_body_bytes": 1 << 20})

    async def status(who: str, path: str, num_bytes: int) -> int:
        headers = {"Content-Type": "application/json"}
        return (await org.ask(who, "POST", path, content=b" " * num_bytes, headers=headers)).status_code

    assert await status("ada", "/v1/loras/manifest", 19 << 10) == 400, "takes 1 + 19"
    assert await status("ada", "/v1/completions", 128 << 10) == 400, "takes 2 and a request"
    assert await status("ada", "/v1/loras/manifest", 60 << 10) == 400, "takes 1 + 50 and no more"
    assert await status("ada", "/v1/loras/manifest", 60 << 10) == 429
    assert await status("bob", "/v1/loras/manifest", 60 << 10) == 400
    assert await status("admin", "/v1/loras/manifest", 60 << 10) == 400


async def test_an_unenforced_limit_refuses_nothing_and_counts(org: Org) -> None:
    await limit(org, calls=0)
    await org.service.accounting.tenants_service.configure_project(org.ids["ada"], {"enforce": False}, actor="test")
    assert (await org.ask("ada", "GET", "/v1/models")).status_code == 200
    assert sum(org.service.accounting.limiter.rejected.values()) == 1


async def test_a_new_project_has_the_limits_of_the_settings(org: Org) -> None:
    made = await org.ask("admin", "POST", "/v1/organization/projects", json={"name": "new"})
    shown = (await org.ask("admin", "GET", f"/v1/tenants/{made.json()['id']}")).json()
    assert shown["calls_per_min"] == 1200
    assert {"kind": "calls", "model": None, "limit": 1200, "remaining": 1200} in shown["limits"]


async def test_limits_of_a_new_project_are_rows_of_its_own(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    limits = TenantLimits({"base": RateLimit(5, 6)}, max_concurrent=3, max_adapters=2, calls_per_min=7)
    made = await owner.create_project("new", actor="test", limits=limits)
    assert made.limits == limits == (await owner.project(made.id)).limits


async def test_callers_without_a_project_are_counted_by_address(service: Service) -> None:
    service.new_project_limits = TenantLimits(calls_per_min=2)
    policy = HttpPolicy(auth="open")
    async with client_of(service, policy, client="10.0.0.9", host="models.example") as http:
        statuses = [(await http.get("/v1/models")).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200, "inference is no call"
    async with client_of(service, policy) as http:
        assert {(await http.get("/v1/models")).status_code for _ in range(4)} == {200}, "the operator"


async def test_wrong_keys_are_counted_by_address(service: Service) -> None:
    service.new_project_limits = TenantLimits(calls_per_min=2)
    async with client_of(service, HttpPolicy(auth="keys"), client="10.0.0.9", host="models.example") as http:
        began_s = time.monotonic()
        answers = [await http.get("/v1/models", headers=bearer(f"wrong-{n}")) for n in range(3)]
    assert [each.status_code for each in answers] == [401, 401, 429]
    assert 30 - (time.monotonic() - began_s) <= int(answers[2].headers["Retry-After"]) <= 30


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("DELETE", "/v1/loras/sql"), ("GET", "/health")])
async def test_a_route_without_a_body_reads_a_little_of_one(org: Org, method: str, path: str) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for number in range(10_000):
            assert number < 5, "it goes on reading"
            yield bytes(1 << 15)

    assert (await org.ask("ada", method, path, content=endless())).status_code == 413
    answer = await org.ask("bob", "GET", "/v1/models", content=b"{}")
    assert answer.status_code == 200


class Parts:
    """A client that sends parts of a body, each after its pause in seconds."""

    def __init__(self, *parts: tuple[float, int], is_complete: bool = True) -> None:
        self.parts, self.is_complete = list(parts), is_complete

    async def receive(self) -> dict[str, Any]:
        if not self.parts:
            await asyncio.Event().wait()
        pause_s, size = self.parts.pop(0)
        if pause_s:  # a part without a pause is here whatever the event loop is busy with
            await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": bytes(size), "more_body": bool(self.parts) or not self.is_complete}


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(metering, "SLOW_AFTER_S", 0.05)
    monkeypatch.setattr(metering, "MIN_BYTES_PER_S", 1000)


@pytest.mark.usefixtures("short_times")
async def test_a_body_has_a_time_that_grows_with_its_bytes() -> None:
    slow: Counter[str] = Counter()
    body = _Body(Parts((0, 1), is_complete=False).receive, slow, _Payer("key"), 1 << 20)
    await body.receive()
    assert slow == {"key": 1}
    with pytest.raises(BodyTimeout, match="only 1 bytes"):
        await body.receive()
    body.close()
    assert not slow
    body = _Body(Parts((0, 10_000), (0.6, 1)).receive, slow, _Payer("key"), 1 << 20)
    for _ in range(2):
        await body.receive()
    assert not slow


@pytest.mark.usefixtures("short_times")
async def test_the_service_s_own_time_does_not_count() -> None:
    body = _Body(Parts((0, 1), (0, 1)).receive, Counter(), _Payer("key"), 1 << 20)
    await body.receive()
    await asyncio.sleep(0.5)
    assert not (await body.receive())["more_body"]


@pytest.mark.usefixtures("short_times")
async def test_waiting_for_the_end_of_a_request_has_no_deadline() -> None:
    client = Parts((0, 1))
    body = _Body(client.receive, Counter(), _Payer("key"), 1 << 20)
    await body.receive()
    leaving = asyncio.ensure_future(body.receive())
    await asyncio.sleep(0.5)
    assert not leaving.done()
    leaving.cancel()


@pytest.mark.usefixtures("short_times")
async def test_a_key_has_so_many_slow_bodies_and_another_key_its_own() -> None:
    slow: Counter[str] = Counter()

    def half_sent(key: str) -> _Body:
        return _Body(Parts((0, 1), is_complete=False).receive, slow, _Payer(key), 1 << 20)

    held = [half_sent("ada") for _ in range(MAX_SLOW_BODIES)]
    await asyncio.gather(*(body.receive() for body in held))
    for refused in (half_sent("ada"), _Body(Parts().receive, slow, _Payer("ada"), 1 << 20)):
        with pytest.raises(QueueFull, match="of this key"):
            await refused.receive()
    whole = _Body(Parts((0, 1)).receive, slow, _Payer("ada"), 1 << 20)
    assert not (await whole.receive())["more_body"], "a body that is here is not slow"
    await half_sent("bob").receive()
    held.pop().close()
    await half_sent("ada").receive()


async def test_a_half_sent_request_is_a_408_and_gives_its_place_back(org: Org, monkeypatch: pytest.MonkeyPatch) -> None:
    await org.service.accounting.tenants_service.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    monkeypatch.setattr(metering, "BODY_TIMEOUT_S", 600.0)
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b"{"
        begun.set()
        await goes_on.wait()
        yield b" "
        await asyncio.Event().wait()

    app = make_app(org.service, HttpPolicy())
    messages = half()
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": await anext(messages), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"host": "test", "content-type": "application/json"} | bearer(org.keys["ada"])
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    asking = asyncio.create_task(app(scope, receive, send))
    async with asyncio.timeout(60):
        await begun.wait()
    assert (await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)).status_code == 429, "one at a time"
    monkeypatch.setattr(metering, "BODY_TIMEOUT_S", 0.0)
    goes_on.set()
    await asking
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "body_timeout"
    answer = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200, answer.text
