"""The benchmark of conversations that begin alike: what is asked, by a server of a few lines, and what is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from app.cli.config_file import read_settings
from load_tests.http.bench_prefix_routing import (
    NUM_REPLICAS,
    OFF,
    ON,
    Bench,
    RoundResult,
    Talk,
    conversations,
    settings,
    table,
)
from load_tests.service import ROOT
from tests.load_tests.fake_server import serving

TALK = Talk(num_prefixes=2, prefix_words=4, num_conversations=6, num_turns=3, turn_words=2, num_streams=2)


def test_turns_continue_what_was_said_and_conversations_share_their_heads() -> None:
    requests = conversations(TALK, "base", seed=3)
    turns = [[request.prompt for request in requests[start : start + 6]] for start in (0, 6, 12)]
    assert len({" ".join(prompt.split()[:4]) for prompt in turns[0]}) == 2
    assert [{len(prompt.split()) for prompt in turn} for turn in turns] == [{6}, {8}, {10}]
    for before, after in pairwise(turns):
        assert all(sum(prompt.startswith(earlier) for earlier in before) == 1 for prompt in after)
    assert requests == conversations(TALK, "base", seed=3)
    assert requests != conversations(TALK, "base", seed=4)


async def test_a_round_is_measured() -> None:
    seconds: Iterator[Mapping[int, float]] = iter([{7: 1.0, 8: 5.0}, {7: 4.0, 8: 6.0}])
    async with serving() as (url, fake):
        bench = Bench(url, lambda: next(seconds), "base", TALK)
        cached = await asyncio.to_thread(bench.measure)
    assert len(fake.bodies) == 18
    (seen,) = bench.results
    assert seen.cached == cached == 0.5
    assert seen.imbalance == 1.5
    assert 0 < seen.p50_s <= seen.p99_s


async def test_a_request_that_fails_ends_the_measurement() -> None:
    async with serving() as (url, _):
        with pytest.raises(RuntimeError, match="refuse: HTTP 429"):
            await asyncio.to_thread(Bench(url, dict, "refuse", TALK).measure)


def test_ratios_are_of_one_round() -> None:
    off = [RoundResult(0.25, 2.0, 4.0, 1.5), RoundResult(0.5, 1.0, 2.0, 1.0)]
    on = [RoundResult(0.5, 1.0, 1.0, 1.5), RoundResult(0.75, 1.0, 1.0, 1.5)]
    lines = table({ON: on, OFF: off}).splitlines()
    assert lines[2].startswith("| off | 0.38 (0.25 to 0.50) | 1.50 ")
    assert lines[4].startswith("| on / off | 1.75 (1.50 to 2.00) | 0.75 (0.50 to 1.00) | 0.38 (0.25 to 0.50) |")


def test_the_two_services_differ_by_the_switch_only(tmp_path: Path) -> None:
    paths = {
        is_on: settings(ROOT / "configs" / "serve.yaml", tmp_path, 320, prefix_affinity=is_on)
        for is_on in (True, False)
    }
    on, off = (read_settings(paths[is_on]) for is_on in (True, False))
    assert (on.placement.prefix_affinity, off.placement.prefix_affinity) == (True, False)
    assert on.model_copy(update={"placement": off.placement}) == off
    (application,) = yaml.safe_load(paths[True].read_text())["applications"]
    assert application["deployments"][1]["num_replicas"] == NUM_REPLICAS
