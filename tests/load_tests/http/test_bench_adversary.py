"""The benchmark of a flood, against a server of a few lines: whose key each request has, and what is reported."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from load_tests.http import bench_adversary
from load_tests.http.bench_adversary import ALONE, CASES_WITHOUT_KEYS, FAIR, UNFAIR, Bench, table
from tests.load_tests.fake_server import serving

KEYS = {"one": "key-one", "flood": "key-flood"}


async def test_every_case_is_measured_with_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_adversary, "LEAD_S", 0.5)
    monkeypatch.setattr(bench_adversary, "AFTER_S", 0.0)
    seen: dict[str, Counter[str]] = {}
    bench = Bench("", KEYS, "base", 2, 3, 4)
    for case in (ALONE, FAIR, UNFAIR):
        async with serving() as (url, fake):  # another one for each: a flood's last requests may come late
            one = Bench(url, KEYS, "base", 2, 3, 4)
            await asyncio.to_thread(one.measure, case)
            seen[case], bench.results[case] = Counter(fake.keys), one.results[case]
    assert seen[ALONE] == {"Bearer key-one": 4}
    assert set(seen[FAIR]) == {"Bearer key-one", "Bearer key-flood"}
    assert set(seen[UNFAIR]) == {"Bearer key-one"}
    assert seen[UNFAIR]["Bearer key-one"] > 4
    assert table(bench).count("\n| ") == 3 + 0
    assert all(len(values) == 1 for values in bench.results.values())


async def test_a_server_without_tenants_is_asked_without_keys() -> None:
    async with serving() as (url, fake):
        bench = Bench(url, {}, "base", 2, 3, 4)
        assert tuple(bench.results) == CASES_WITHOUT_KEYS
        await asyncio.to_thread(bench.measure, ALONE)
        assert set(fake.keys) == {"Bearer none"}


async def test_a_request_that_fails_ends_the_measurement() -> None:
    async with serving() as (url, _):
        with pytest.raises(RuntimeError, match="one: HTTP 429"):
            await asyncio.to_thread(Bench(url, KEYS, "refuse", 1, 2, 2).measure, ALONE)
