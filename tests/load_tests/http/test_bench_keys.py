"""The benchmark of metering measures requests that are admitted."""

from __future__ import annotations

from load_tests.http.bench_keys import metering_us


async def test_metering_is_measured_for_both_kinds_of_requests() -> None:
    added_us = await metering_us(num_requests=50, num_rounds=3)
    assert added_us.keys() == {"POST /v1/chat/completions", "GET /v1/models"}
    assert all(0 < each < 5000 for each in added_us.values())
