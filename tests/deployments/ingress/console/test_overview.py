"""What the console's screens read: the overview and its stream, the residency map, and the table of adapters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.routes import overview as routes
from app.deployments.ingress.overview import STATS_AGE_S, SharedReads
from app.deployments.registry.models import DEFAULT_TENANT, Registration
from app.deployments.tenancy.usage.adapter_stats import Activity
from app.deployments.tenancy.usage.traffic_history import BUCKET_S, SETTLE_S, BucketPart, Gauges
from app.engine.errors import NotReady
from tests.deployments.http_service import Service
from tests.deployments.ingress.console.test_sessions import bearer
from tests.deployments.tenancy.usage.test_traffic_history import Clock

ASK = {"model": "sql", "prompt": "hi", "max_tokens": 6, "ignore_eos": True}


async def at_the_end_of_a_bucket(service: Service, clock: Clock) -> None:
    """The ingress has reported, and its part can be read."""
    await service.traffic.report()
    clock.now_s += BUCKET_S + SETTLE_S
    service.overview._reads._found.clear()


@pytest.fixture
def clock(service: Service) -> Clock:
    """Of the traffic, instead of the real one."""
    clock = Clock()
    service.traffic._clock = service.managed.traffic._clock = clock
    return clock


async def test_the_overview_of_an_operator(http: httpx.AsyncClient, service: Service, clock: Clock) -> None:
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200
    await at_the_end_of_a_bucket(service, clock)
    body = (await http.get("/v1/overview")).json()
    assert body["is_ready"]
    assert body["samples"]["requests"] == [1]
    assert body["samples"]["completion_tokens"] == [6]
    assert [each["state"] for each in body["replicas"]] == ["running"]
    assert body["replicas"][0]["stats"]["num_running"] == 0
    assert body["events"][0]["name"] == "sql"
    assert (await http.get("/v1/overview?since=1000000")).json()["samples"]["times"] == []
    changes = body["changes"]
    await http.patch("/v1/loras/sql", json={"description": "answers"})
    assert (await http.get("/v1/overview")).json()["changes"] > changes


async def test_a_probe_is_no_request(http: httpx.AsyncClient, service: Service, clock: Clock) -> None:
    service.observe("health", 503, None)
    service.observe("completions", 503, None)
    await at_the_end_of_a_bucket(service, clock)
    samples = (await http.get("/v1/overview")).json()["samples"]
    assert (samples["requests"], samples["refused"]) == ([1], [1])


async def test_every_ingress_shows_the_traffic_of_all(http: httpx.AsyncClient, service: Service, clock: Clock) -> None:
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200
    parts = [
        BucketPart(int(clock.now_s // BUCKET_S), "default", Activity(num_requests=2, completion_tokens=5)),
        BucketPart(int(clock.now_s // BUCKET_S), None, gauges=Gauges(3, 1, 1)),
    ]
    await service.managed.traffic.add("another", parts)
    await at_the_end_of_a_bucket(service, clock)
    body = (await http.get("/v1/overview")).json()
    samples = body["samples"]
    assert (samples["requests"], samples["completion_tokens"], samples["open"]) == ([3], [11], [3])
    assert body["num_open_requests"] == (await http.get("/v1/status")).json()["num_open_requests"] == 3


async def test_a_replica_that_does_not_answer_has_no_counts(http: httpx.AsyncClient, service: Service) -> None:
    async def stats(replica_id: str) -> dict[str, Any]:
        raise ConnectionError(replica_id)

    service.overview._replicas.stats = stats  # type: ignore[method-assign]
    assert (await http.get("/v1/overview")).json()["replicas"][0]["stats"] is None


async def test_a_stream_sends_an_overview_at_intervals(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "BUCKET_S", 0.01)
    monkeypatch.setattr(routes, "STREAM_S", 0.05)
    answer = await http.get("/v1/overview?stream=true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *bodies, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    assert len(bodies) >= 2
    assert all(json.loads(body)["object"] == "overview" for body in bodies)
    monkeypatch.setattr(routes, "MAX_STREAMS", 0)
    assert (await http.get("/v1/overview?stream=true")).status_code == 429
    assert service.overview is not None


async def test_a_project_sees_nothing_of_others(service: Service) -> None:
    tenants = service.managed.tenants_client
    project = await tenants.create_project("atlas", actor="test")
    _, issued = await tenants.create_account(project.id, "app", with_key=True, expires_in_s=None, actor="test")
    assert issued is not None
    transport = httpx.ASGITransport(make_app(service, HttpPolicy()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=bearer(issued.value)) as client:
        body = (await client.get("/v1/overview")).json()
        assert (body["num_adapters"], body["events"], body["changes"]) == (0, [], 0)
        assert {"replicas", "tiers", "num_open_requests", "policy"}.isdisjoint(body)
        assert "open" not in body["samples"]
        for path in ("/v1/residency", "/v1/settings"):
            assert (await client.get(path)).status_code == 403


async def test_pages_share_their_calls_to_the_store(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    store = service.overview._store

    def count(name: str) -> None:
        read = getattr(store, name)

        async def counted(*args: Any, **options: Any) -> Any:
            calls.append(name)
            await asyncio.sleep(0)
            return await read(*args, **options)

        monkeypatch.setattr(store, name, counted)

    count("events")
    count("stats")
    now_s = 0.0
    monkeypatch.setattr(service.overview._reads, "_steady_clock", lambda: now_s)
    answers = await asyncio.gather(*(http.get("/v1/overview") for _ in range(20)))
    assert {each.json()["events"][0]["name"] for each in answers} == {"sql"}
    assert sorted(calls) == ["events", "stats"]
    now_s += STATS_AGE_S + 0.1
    await http.get("/v1/overview")
    assert sorted(calls) == ["events", "events", "stats", "stats"]


async def test_a_failed_read_is_tried_again_and_old_ones_are_forgotten() -> None:
    now_s, outcomes = 0.0, [NotReady("the store restarts"), 1, 2]

    async def read() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    reads = SharedReads(lambda: now_s)
    with pytest.raises(NotReady):
        await reads.get("a", read)
    assert await reads.get("a", read) == await reads.get("a", read) == 1
    now_s = STATS_AGE_S + 0.1
    assert await reads.get("b", read) == 2
    assert [*reads._found] == ["b"]


async def test_the_residency_map(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=ASK)
    body = (await http.get("/v1/residency")).json()
    adapters = body["adapters"]
    at = adapters["name"].index("sql")
    assert adapters["resident"][at] == [0]
    assert adapters["assigned"][at] == [0]
    assert adapters["host"][at]
    assert body["tenants"][adapters["tenant"][at]] == DEFAULT_TENANT
    one = (await http.get("/v1/residency?name=sql")).json()
    assert (one["adapters"]["name"], one["preference"]) == (["sql"], [0])
    assert (await http.get("/v1/residency?name=nobody")).status_code == 404


async def test_settings_are_shown_with_what_differs_from_the_default(http: httpx.AsyncClient) -> None:
    rows = {each["id"]: each for each in (await http.get("/v1/settings")).json()["data"]}
    assert (rows["model.name"]["value"], rows["model.name"]["is_set"]) == ("base", True)
    assert rows["http.console"] == {
        "id": "http.console", "value": True, "default": True, "is_set": False,
        "description": "Whether the web console is served at /console.",
    }  # fmt: skip
    assert rows["limits.max_body_bytes"]["is_set"]
    assert "engine.block_size" in rows


async def test_adapters_are_searched_sorted_and_paged_by_the_server(http: httpx.AsyncClient, service: Service) -> None:
    new = [Registration(f"many-{number:03}", f"many/{number}", float(number % 7), None) for number in range(600)]
    await service.managed.client.register(new, tenant_id=DEFAULT_TENANT, who="ada")

    async def names(query: str) -> tuple[list[str], int, bool]:
        body = (await http.get(f"/v1/loras?{query}")).json()
        return [each["id"] for each in body["data"]], body["total"], body["has_more"]

    assert await names("limit=2") == (["many-000", "many-001"], 601, True)
    assert await names("limit=2&after=many-598") == (["many-599", "sql"], 601, False)
    assert await names("limit=2&offset=599") == (["many-599", "sql"], 601, False)
    assert await names("sort=-name&limit=1") == (["sql"], 601, True)
    assert await names("search=MANY-59&limit=3") == (["many-590", "many-591", "many-592"], 10, True)
    assert await names("state=LOADED") == (["sql"], 1, False)
    assert (await names("sort=-traffic_weight&limit=1"))[0] == ["many-594"]
    assert await names("search=many&offset=598") == (["many-598", "many-599"], 600, False)
    assert await names("search=many&after=many-597") == (["many-598", "many-599"], 600, False)
    assert await names("pinned=true") == ([], 0, False)
    assert (await http.get("/v1/loras?sort=created&after=sql")).status_code == 400
    assert (await http.get("/v1/loras?sort=colour")).status_code == 400
