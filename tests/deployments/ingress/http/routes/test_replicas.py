"""Draining an engine replica, and what the autoscaling policy decided."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.placement.autoscaling import AdapterDemand
from app.engine.errors import NotReady
from tests.deployments.http_service import Service
from tests.deployments.ingress.console.test_sessions import Keys, bearer, keys
from tests.deployments.placement.test_autoscaling import MUCH, context

__all__ = ["keys"]

ASK = {"model": "sql", "prompt": "hi", "max_tokens": 40, "ignore_eos": True}


@pytest_asyncio.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service with two replicas; no keys."""
    service.fleet.add()
    transport = httpx.ASGITransport(make_app(service, HttpPolicy()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def drain(http: httpx.AsyncClient, replica_id: str, query: str = "") -> tuple[int, str]:
    answer = await http.post(f"/v1/replicas/{replica_id}/drain{query}")
    body = answer.json()
    return answer.status_code, body["error"]["code"] if "error" in body else body["state"]


async def test_a_drained_replica_ends_its_requests_and_gets_no_new_ones(
    http: httpx.AsyncClient, service: Service
) -> None:
    for replica in service.fleet.replicas.values():
        replica.backend.max_steps = 1
    running = [asyncio.create_task(http.post("/v1/completions", json=ASK)) for _ in range(8)]
    while sum(len(replica.submitted) for replica in service.fleet.replicas.values()) < 8:
        await asyncio.sleep(0.01)
    one, other = sorted(service.fleet.replicas.values(), key=lambda replica: -len(replica.submitted))
    assert await drain(http, one.replica_id) == (202, "draining")
    num_submitted = len(one.submitted)
    for replica in service.fleet.replicas.values():
        replica.backend.max_steps = None
    answers = [await http.post("/v1/completions", json=ASK) for _ in range(4)]
    assert {each.status_code for each in answers + await asyncio.gather(*running)} == {200}
    assert len(one.submitted) == num_submitted
    assert len(other.submitted) == 12 - num_submitted
    replicas = {each["id"]: each for each in (await http.get("/v1/overview")).json()["replicas"]}
    assert [replicas[each.replica_id]["state"] for each in (one, other)] == ["draining", "running"]
    assert await drain(http, one.replica_id) == (409, "replica_draining")
    (record,) = (await http.get("/v1/audit?name=" + one.replica_id)).json()["data"]
    assert (record["action"], record["who"]) == ("drain replica", "http 127.0.0.1")


async def test_the_only_replica_is_drained_if_the_operator_insists(http: httpx.AsyncClient, service: Service) -> None:
    assert await drain(http, "replica-0") == (202, "draining")
    assert await drain(http, "replica-1") == (409, "last_replica")
    refused = await http.post("/v1/replicas/replica-1/drain")
    assert refused.headers["X-Should-Retry"] == "false"
    assert await drain(http, "replica-1", "?force=true") == (202, "draining")
    refused = await http.post("/v1/completions", json=ASK)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True), "once it has waited"
    service.fleet.add()
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200


async def test_a_replica_that_is_unknown_or_out_of_reach_is_not_drained(
    http: httpx.AsyncClient, service: Service
) -> None:
    assert await drain(http, "replica-7") == (404, "not_found")
    assert await drain(http, "replica-0", "?force=maybe") == (400, "invalid_request")
    service.fleet.replicas["replica-0"].draining = True  # Serve stops it, and its report has yet to come
    assert await drain(http, "replica-0") == (503, "not_ready")


async def test_a_replica_that_drains_before_its_report_has_come_is_not_drained_again(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = service.fleet.view
    monkeypatch.setattr(type(service.fleet), "view", view)  # no report comes any more
    assert await drain(http, "replica-0") == (202, "draining")
    assert await drain(http, "replica-0") == (409, "replica_draining")


async def test_only_an_operator_drains(http: httpx.AsyncClient, keys: Keys, service: Service) -> None:
    for headers, status in ((bearer(keys.project), 403), ({}, 401), (bearer(keys.admin), 202)):
        answer = await http.post("/v1/replicas/replica-0/drain", headers=headers)
        assert answer.status_code == status
    as_project = bearer(keys.admin) | {"OpenAI-Project": keys.project_id}
    assert (await http.post("/v1/replicas/replica-0/drain", headers=as_project)).status_code == 409
    audit = (await http.get("/v1/audit", headers=bearer(keys.admin))).json()["data"]
    assert audit[0]["who"].startswith(keys.admin_id)
    assert (await http.get("/v1/audit", headers=bearer(keys.project))).json()["data"] == [], "not a project's affair"
    assert service.fleet.drained == {"replica-0"}


async def test_decisions_of_the_policy_are_shown_with_their_reasons(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await http.get("/v1/status")).json()["scaling_decisions"] == []
    policy = AdapterDemand(target_drain_s=2.0, forecast_s=0)
    policy(context(1, 100.0, {}, **MUCH))
    await service.placement.report_scaling("EngineReplica", [*policy._decisions])
    service.overview._reads._found.clear()
    for path in ("/v1/status", "/v1/overview"):
        (decision,) = (await http.get(path)).json()["scaling_decisions"]
        assert decision.pop("needed_replicas") == pytest.approx(2.9)
        assert decision == {
            "deployment": "EngineReplica", "created": 100, "prev_num_replicas": 1, "target_num_replicas": 3,
            "reason": "pending tokens",
        }  # fmt: skip

    async def down() -> None:
        raise NotReady("placement restarts")

    monkeypatch.setattr(service.overview, "_read_scaling", down)
    service.overview._reads._found.clear()
    assert (await http.get("/v1/overview")).json()["scaling_decisions"] is None, "the rest is shown"
