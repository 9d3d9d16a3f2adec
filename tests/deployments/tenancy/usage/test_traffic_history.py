"""The hour of traffic that the console draws: parts of all ingresses, summed."""

from __future__ import annotations

import pickle

import pytest

from app.deployments.tenancy.usage.adapter_stats import Activity, first_token
from app.deployments.tenancy.usage.traffic_history import (
    BUCKET_S,
    MAX_TENANTS,
    NUM_BUCKETS,
    OPEN_S,
    SETTLE_S,
    BucketPart,
    Gauges,
    TrafficHistory,
)

ONE = Activity(num_requests=1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s

    @property
    def number(self) -> int:
        return int(self.now_s // BUCKET_S)


async def test_a_history_has_complete_buckets_of_an_hour_and_no_more() -> None:
    clock = Clock()
    history = TrafficHistory(clock)
    answered = BucketPart(clock.number, "a", Activity(1, 0, 10, 4, 6).plus(first_token(0.5)))
    await history.add("one", [answered, BucketPart(clock.number, None, ONE, num_refused=1)])
    clock.now_s += BUCKET_S
    assert (await history.series(0, None))["times"] == [], "other ingresses may not have reported yet"
    await history.add("one", [BucketPart(clock.number, None, gauges=Gauges(3, 2, 1))])
    clock.now_s += BUCKET_S + SETTLE_S
    series = await history.series(0, None)
    assert series["times"] == [1_000_000, 1_000_000 + BUCKET_S]
    assert (series["requests"], series["refused"], series["completion_tokens"]) == ([2, 0], [1, 0], [6, 0])
    assert series["time_to_first_token_p50"][0] == pytest.approx(0.5, rel=0.2)
    assert series["time_to_first_token_p50"][1] is None
    assert (series["open"], series["queued"], series["replicas"]) == ([None, 3], [None, 2], [None, 1])
    assert (await history.series(1_000_000, None))["times"] == [1_000_000 + BUCKET_S]
    clock.now_s += NUM_BUCKETS * BUCKET_S
    assert (await history.series(0, None))["times"] == []
    await history.add("one", [BucketPart(clock.number, None, ONE), answered])
    assert [*history._all] == [clock.number], "what is older than an hour is forgotten"


async def test_parts_of_ingresses_are_added_in_any_order() -> None:
    clock = Clock()
    history = TrafficHistory(clock)
    first = clock.number
    clock.now_s += BUCKET_S
    await history.add(
        "one", [BucketPart(clock.number, "a", ONE), BucketPart(clock.number, None, gauges=Gauges(1, 9, 2))]
    )
    await history.add("two", [BucketPart(first, "a", ONE), BucketPart(clock.number, "a", ONE.plus(ONE))])
    await history.add("two", [BucketPart(clock.number, None, gauges=Gauges(4, 7, 3))])
    clock.now_s += BUCKET_S + SETTLE_S
    series = await history.series(0, None)
    assert series["times"] == [1_000_000, 1_000_000 + BUCKET_S]
    assert series["requests"] == (await history.series(0, "a"))["requests"] == [1, 3]
    assert (series["open"], series["queued"], series["replicas"]) == ([None, 5], [None, 9], [None, 3])


async def test_a_clock_ahead_or_set_back_loses_no_request() -> None:
    clock = Clock()
    history = TrafficHistory(clock)
    await history.add("ahead", [BucketPart(clock.number + 1000, None, ONE)])
    clock.now_s += BUCKET_S + SETTLE_S
    assert (await history.series(0, None))["times"] == [1_000_000], "counted when it arrived"
    clock.now_s -= 3600
    await history.add("one", [BucketPart(clock.number, None, ONE)])
    clock.now_s += BUCKET_S + SETTLE_S
    series = await history.series(0, None)
    assert (len(series["times"]), series["requests"]) == (1, [1])


async def test_a_tenant_sees_its_own_requests_and_few_tenants_are_kept() -> None:
    clock = Clock()
    history = TrafficHistory(clock)
    await history.add("one", [BucketPart(clock.number, f"t{number}", ONE) for number in range(MAX_TENANTS + 1)])
    clock.now_s += BUCKET_S + SETTLE_S
    assert (await history.series(0, None))["requests"] == [MAX_TENANTS + 1]
    assert (await history.series(0, "t5"))["requests"] == [1]
    assert (await history.series(0, "t0"))["requests"] == []
    assert "open" not in await history.series(0, "t5")


async def test_open_requests_of_the_other_ingresses() -> None:
    clock, steady = Clock(), Clock()
    history = TrafficHistory(clock, steady)
    for ingress, number in (("one", 3), ("two", 4)):
        await history.add(ingress, [BucketPart(clock.number, None, gauges=Gauges(number, 0, 0))])
    assert await history.num_open_elsewhere("one") == 4
    assert await history.num_open_elsewhere("three") == 7
    steady.now_s += 1
    await history.add("two", [BucketPart(clock.number, None, gauges=Gauges(5, 0, 0))])
    steady.now_s += OPEN_S
    assert await history.num_open_elsewhere("three") == 5, "one has died"
    steady.now_s += OPEN_S
    assert await history.num_open_elsewhere("three") == 0


def test_a_part_travels_by_name() -> None:
    part = BucketPart(7, "a", ONE.plus(first_token(0.1)), 2, Gauges(1, 2, 3))
    assert pickle.loads(pickle.dumps(part)) == part
