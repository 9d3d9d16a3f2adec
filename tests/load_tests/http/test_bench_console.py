"""The benchmark of the console reads what a page reads, and its collector takes traces."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from load_tests.http.bench_console import PAGE, PLAIN, ROLES, TRACED, Bench, collector, open_page, table
from load_tests.service import free_port
from tests.deployments.ingress.console.fake_service import fake_service, serving


async def test_an_open_page_gets_events_until_it_is_closed(tmp_path: Path) -> None:
    async with fake_service(tmp_path) as service, serving(service, free_port()) as url, aiohttp.ClientSession() as http:
        async with open_page(http, url) as sizes:
            while not sizes:
                await asyncio.sleep(0.05)
        num_events = len(sizes)
        await asyncio.sleep(0.1)
        assert len(sizes) == num_events
        others = asyncio.all_tasks()
        with pytest.raises(aiohttp.ClientResponseError, match="404"):
            async with open_page(http, f"{url}/nothing"):
                await asyncio.wait(asyncio.all_tasks() - others, timeout=120)  # the page's own


async def test_the_collector_counts_what_it_gets() -> None:
    async with collector() as (url, num_bytes), aiohttp.ClientSession() as http:
        async with http.post(f"{url}/v1/traces", data=bytes(70)) as answer:
            assert answer.status == 200
        assert num_bytes() == 70


def test_costs_are_differences_for_the_same_work() -> None:
    bench = Bench("", 0, "base", num_requests=1, num_streams=1, rest_s=1.0)
    percents = {(PLAIN, True): 2.0, (PAGE, True): 2.5, (PLAIN, False): 40.0, (PAGE, False): 20.5, (TRACED, False): 44.0}
    for case, value in percents.items():
        for role in ROLES:
            bench.percents[case][role] = [value if role == "ingress" else 0.0] * 3
    bench.ingress_us.update({PLAIN: [400.0], TRACED: [440.0]})
    took_s = {case: [10.0] * 3 for case in percents} | {(PAGE, False): [20.0] * 3}  # half as fast, the same work
    text = table(bench, took_s)
    assert "| an open page, at rest: more by | +0.50 |" in text
    assert "| an open page, under load: more by | +1.00 |" in text
    assert "| traced, under load: more by | +4.00 |" in text
    assert "440 us of CPU for one; 400 without" in text
