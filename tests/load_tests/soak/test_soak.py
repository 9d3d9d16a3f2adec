"""What the soak test calls wrong."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from load_tests.soak import __main__ as soak
from load_tests.soak.resources import JUDGED_S, SETTLED_S, Resources, count_rows, slope_per_hour
from load_tests.soak.traffic import KINDS, NUM_TOKENS, Traffic


def test_a_slope_is_the_change_per_hour_as_a_fraction_of_the_mean() -> None:
    times_s = np.arange(0.0, 7200.0, 15.0)
    assert slope_per_hour(times_s, 1000 + 20 * times_s / 3600) == pytest.approx(20 / 1020, rel=1e-2)
    assert slope_per_hour(times_s, np.full(len(times_s), 7.0)) == pytest.approx(0.0, abs=1e-9)
    assert slope_per_hour(times_s[:1], [1.0]) == 0.0


def test_this_process_is_sampled_and_only_a_long_rise_is_wrong(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "catalog.sqlite") as connection:
        connection.execute("create table one (a)")
        connection.executemany("insert into one values (?)", [(1,), (2,)])
    connection.close()
    assert count_rows(tmp_path / "catalog.sqlite") == 2
    resources = Resources(os.getsid(0), tmp_path)
    resources.sample()
    assert resources.series["database rows"] == [2.0]
    memory = next(name for name in resources.series if name.endswith("memory kB"))
    assert resources.series[memory][0] > 1000
    resources.times_s = list(np.arange(0.0, SETTLED_S + JUDGED_S + 30.0, 15.0))
    resources.series = {
        "engine: memory kB": [1000 + 0.02 * 1000 * time_s / 3600 for time_s in resources.times_s],
        "store: memory kB": [1000.0 for _ in resources.times_s],
    }
    assert resources.wrongs() == ["engine: memory kB rose by 2.0% an hour"]
    resources.times_s = [time_s / 2 for time_s in resources.times_s]
    assert resources.wrongs() == []


def test_each_answer_is_compared_and_usage_is_bounded_by_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a": "right", "b": "right"}

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        text = "wrong" if body["model"] == "b" and body["temperature"] == 0 else "right"
        choices = [{"text": text}] * body.get("n", 1)
        if body.get("stream"):
            return httpx.Response(200, text=f"data: {json.dumps({'choices': choices})}\n\ndata: [DONE]\n\n")
        return httpx.Response(200, json={"choices": choices})

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(Traffic, "_http", lambda _: httpx.AsyncClient(base_url="http://x", transport=transport))
    traffic = Traffic("http://x", texts, ["key"], seed=3)
    kinds, deadline_s = {*KINDS, "streamed", "wrong"}, time.monotonic() + 120
    assert asyncio.run(traffic.capacity(2, 2.0)) > 0
    while set(traffic.ended) < kinds and time.monotonic() < deadline_s:  # a busy machine sends few of them
        asyncio.run(traffic.capacity(2, 0.5))
    assert set(traffic.ended) == kinds
    assert traffic.wrongs
    assert all(" b: RuntimeError: wrong tokens: " in wrong for wrong in traffic.wrongs)

    found = {"data": [{"results": [{"output_tokens": 50}, {"output_tokens": 10}]}, {"results": []}]}

    async def wrongs(num_tokens: int, num_abandoned: int) -> list[str]:
        service = httpx.MockTransport(lambda _: httpx.Response(200, json=found))
        async with httpx.AsyncClient(base_url="http://x", transport=service) as http:
            return await soak.check_usage(http, 0, num_tokens, num_abandoned)

    monkeypatch.setattr(soak, "USAGE_WITHIN_S", 0.01)
    assert asyncio.run(wrongs(60, 0)) == []
    assert asyncio.run(wrongs(60 - NUM_TOKENS, 1)) == []
    assert asyncio.run(wrongs(60 - NUM_TOKENS, 0)) != []
    assert asyncio.run(wrongs(61, 5)) != []
