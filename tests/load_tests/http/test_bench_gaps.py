"""The benchmark of gaps over HTTP, against a server of a few lines: what is asked beside the streams."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from load_tests.http import bench_gaps
from load_tests.http.bench_gaps import COLD, NOTHING, NUM_ADAPTERS, NUM_PROMPTS, PROMPTS, Bench
from tests.load_tests.fake_server import serving


async def test_every_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gaps, "LEAD_S", 0.05)
    monkeypatch.setattr(bench_gaps, "NOTHING_S", 0.1)
    async with serving() as (url, fake):
        folders = [Path(f"/adapters/a{i}") for i in range(NUM_ADAPTERS)]
        bench = Bench(url, "base", folders, num_streams=2, num_words=50)
        p99_s = {case: await asyncio.to_thread(bench.measure, case) for case in (COLD, PROMPTS, NOTHING)}
    assert {case: seen[0].p99_s for case, seen in bench.seen.items()} == p99_s
    assert all(0 < seen[0].p99_s <= seen[0].longest_s for seen in bench.seen.values())
    assert sorted(fake.registered) == sorted(str(folder) for folder in folders)
    asked = Counter((body["model"], len(body["prompt"].split())) for body in fake.bodies)
    assert asked["base", 50] == NUM_PROMPTS
    assert all(asked[folder.name, 2] == 1 for folder in folders)


async def test_a_request_that_fails_ends_the_measurement() -> None:
    async with serving() as (url, _):
        with pytest.raises(RuntimeError, match="break: the stream ended without"):
            await asyncio.to_thread(Bench(url, "break", [], num_streams=2, num_words=5).measure, NOTHING)
