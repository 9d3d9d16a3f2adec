"""Prometheus's page on the service's own port: who may read it, and what it is without Ray's agents."""

from __future__ import annotations

import httpx
import pytest

from app.config import MANAGEMENT_TOKEN, HttpConfig
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.tenancy.auth.key_crypto import key_digest
from tests.deployments.http_service import Service
from tests.deployments.ingress.console.test_sessions import bearer
from tests.deployments.ingress.http.middleware.test_auth import Org, org
from tests.deployments.rpc.test_metrics_agents import PAGE, agent

__all__ = ["org"]

TOKEN = key_digest("the management token")


async def read(service: Service, policy: HttpPolicy, address: str, headers: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(make_app(service, policy), raise_app_exceptions=False, client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        return await client.get("/metrics")


async def test_this_machine_reads_them_without_a_key(service: Service, http: httpx.AsyncClient) -> None:
    with agent(lambda: PAGE) as node:
        service.nodes = [node]
        answer = await http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'ray_polylora_requests_total{WorkerId="N",route="chat"} 3.0\n' in answer.text
    assert answer.text.endswith("\n")


async def test_others_need_an_operators_key(org: Org) -> None:
    with agent(lambda: PAGE) as node:
        org.service.nodes = [node]
        assert (await org.ask("admin", "GET", "/metrics")).status_code == 200
        assert (await org.ask("bob", "GET", "/metrics")).status_code == 403
        for headers in ({}, bearer("sk-wrong")):
            assert (await read(org.service, HttpPolicy(), "127.0.0.1", headers)).status_code == 401


@pytest.mark.parametrize(
    ("address", "headers", "status"),
    [("10.0.0.9", {}, 401), ("10.0.0.9", bearer("wrong"), 401), ("10.0.0.9", bearer(TOKEN), 200)],
)
async def test_the_management_token_reads_them(
    service: Service, address: str, headers: dict[str, str], status: int
) -> None:
    policy = HttpPolicy.of(HttpConfig(management="token", auth="open"), {MANAGEMENT_TOKEN: TOKEN}, "0.0.0.0")
    with agent(lambda: PAGE) as node:
        service.nodes = [node]
        assert (await read(service, policy, address, headers)).status_code == status


async def test_other_machines_read_nothing_without_keys(service: Service) -> None:
    assert (await read(service, HttpPolicy(auth="open"), "10.0.0.9", {})).status_code == 403


async def test_without_agents_the_service_says_so(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error"]["code"] == "not_ready"
    assert "no metrics agent of Ray answers" in answer.json()["error"]["message"]
