"""What an ingress reports of its traffic to the store's process."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest

from app.deployments.ingress import traffic_reporter
from app.deployments.tenancy.usage.traffic_history import BUCKET_S, SETTLE_S, BucketPart
from app.engine.errors import NotReady
from tests.deployments.http_service import Service
from tests.deployments.tenancy.usage.test_traffic_history import Clock

ASK = {"model": "sql", "prompt": "hi", "max_tokens": 6, "ignore_eos": True}


class Sent:
    """A history that may be away; it takes a note of what it was sent."""

    def __init__(self) -> None:
        self.is_away = False
        self.parts: list[list[BucketPart]] = []

    async def add(self, ingress_id: str, parts: Sequence[BucketPart]) -> None:
        assert ingress_id
        if self.is_away:
            raise NotReady("the store restarts")
        self.parts.append([*parts])


@pytest.fixture
def clock(service: Service, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(service.traffic, "_clock", clock)
    return clock


@pytest.fixture
def sent(service: Service, monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent = Sent()
    monkeypatch.setattr(service.traffic, "history", sent)
    return sent


async def test_an_idle_ingress_reports_once_per_bucket(service: Service, clock: Clock, sent: Sent) -> None:
    for _ in range(3):
        await service.traffic.report()
    assert [len(parts) for parts in sent.parts] == [1]
    assert sent.parts[0][0].gauges is not None
    assert sent.parts[0][0].gauges.num_replicas == 1
    clock.now_s += BUCKET_S
    await service.traffic.report()
    assert [parts[0].number for parts in sent.parts] == [clock.number - 1, clock.number]


async def test_requests_of_a_bucket_are_one_part_per_tenant(
    http: httpx.AsyncClient, service: Service, clock: Clock, sent: Sent
) -> None:
    number = clock.number
    for _ in range(3):
        assert (await http.post("/v1/completions", json=ASK)).status_code == 200
    for status in (503, 500):
        service.observe("completions", status, None)
    await service.traffic.report()
    (parts,) = sent.parts
    by_tenant = {part.tenant_id: part for part in parts}
    assert len(parts) == len(by_tenant) == 2
    assert {part.number for part in parts} == {number}
    answered, unknown = by_tenant["default"], by_tenant[None]
    assert (answered.activity.num_requests, answered.activity.completion_tokens) == (3, 18)
    assert (unknown.activity.num_requests, unknown.activity.num_errors, unknown.num_refused) == (2, 1, 1)


async def test_what_the_store_did_not_take_is_sent_later_under_its_time(
    service: Service, clock: Clock, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent.is_away = True
    service.observe("completions", 500, None)
    with pytest.raises(NotReady):
        await service.traffic.report()
    await service.traffic.close()
    clock.now_s += BUCKET_S
    service.observe("completions", 500, None)
    sent.is_away = False
    await service.traffic.report()
    (parts,) = sent.parts
    assert [(part.number, part.activity.num_requests) for part in parts] == [(clock.number - 1, 1), (clock.number, 1)]
    sent.is_away = True
    monkeypatch.setattr(traffic_reporter, "MAX_PENDING", 10)
    for _ in range(30):
        clock.now_s += BUCKET_S
        service.observe("completions", 500, None)
    sent.is_away = False
    await service.traffic.report()
    assert [part.number for part in sent.parts[-1]] == [*range(clock.number - 9, clock.number + 1)], "the newest"


async def test_an_idle_ingress_that_ends_does_not_ask_for_the_store(service: Service, sent: Sent) -> None:
    """It may have ended first, and a call would start it again."""
    await service.traffic.close()
    assert sent.parts == []


async def test_an_ingress_that_ends_reports_what_it_has_seen(service: Service, clock: Clock) -> None:
    service.managed.traffic._clock = clock
    service.observe("completions", 500, None)
    await service.traffic.close()
    clock.now_s += BUCKET_S + SETTLE_S
    assert (await service.managed.traffic.series(0, None))["errors"] == [1]
