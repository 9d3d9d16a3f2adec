"""Lines about requests, and the one id that a request has in its header, its body and the log."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.logging import LogEvent
from tests.deployments.http_service import Service

BODY = {"model": "sql", "prompt": "secret words", "max_tokens": 2, "ignore_eos": True}


@pytest_asyncio.fixture
async def logged(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that writes every request down."""
    transport = httpx.ASGITransport(make_app(service, HttpPolicy(), log_requests=True), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        yield client


def log_events(caplog: pytest.LogCaptureFixture) -> list[LogEvent]:
    return [record.msg for record in caplog.records if isinstance(record.msg, LogEvent)]


async def test_one_id_is_in_the_header_the_body_and_the_log(
    logged: httpx.AsyncClient, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app")
    for _ in range(2):  # ids are their senders' business: the engine does not confuse two
        answer = await logged.post("/v1/completions?key=hidden", json=BODY, headers={"X-Request-ID": "r-1"})
        assert answer.json()["id"] == "cmpl-r-1"
    first, second = log_events(caplog)
    assert first.known | {"seconds": 0} == {
        "id": "r-1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "client": "127.0.0.1",
        "model": "sql",
        "seconds": 0,
    }
    assert "secret" not in caplog.text
    assert "hidden" not in caplog.text
    unique = [job.requests[0].request_id for job, _ in service.counted if job is not None]
    assert len(set(unique)) == 2
    assert all("r-1" in request_id for request_id in unique)
    assert second.known["id"] == "r-1"


@pytest.mark.parametrize("given", ["", "two words", "x" * 65, "é", "a\tb", "-x", f"sk-poly-{'x' * 43}"])
async def test_an_id_that_is_not_plain_is_replaced(logged: httpx.AsyncClient, given: str) -> None:
    answer = await logged.post("/v1/completions", json=BODY, headers={"X-Request-ID": given.encode()})
    assert answer.status_code == 200
    assert answer.json()["id"].removeprefix("cmpl-").isalnum()


@pytest.mark.parametrize("stream", [False, True])
async def test_our_own_failures_are_always_logged(
    http: httpx.AsyncClient, service: Service, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "app.deployments.ingress.http")
    assert (await http.post("/v1/completions", json=BODY | {"model": "nobody"})).status_code == 404
    assert log_events(caplog) == [], "the client's mistake"
    service.fleet.adapters.clear()  # fetching one meets an unexpected error
    answer = await http.post("/v1/completions", json=BODY | {"max_tokens": 50, "stream": stream})
    (line,) = log_events(caplog)
    assert line.what == "request failed"
    service.fleet.drop("replica-0")
    assert (await http.get("/readyz")).status_code == 503
    assert log_events(caplog) == [line], "a probe asks for it"
    assert line.known["reason"] in answer.text
