"""The whole generator against a tiny server: seeded, from the command line's options to the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from load_tests.client import Endpoint, closed_loop, open_loop
from load_tests.run import main
from load_tests.workload import PlannedRequest, WorkloadConfig, plan
from tests.load_tests.fake_server import FakeServer, serving

CONFIG = WorkloadConfig(seed=11, num_requests=30, rate=300, prompt_lengths="uniform:3:9", output_lengths="uniform:1:6")


async def test_every_request_is_sent_as_planned_and_counted() -> None:
    requests = plan(replace(CONFIG, num_tenants=2), ["a", "b", "c"])
    async with serving() as (url, fake):
        endpoint = Endpoint(url, "shared", {"tenant-1": "own"}, {"ignore_eos": True})
        outcomes = await open_loop(endpoint, requests)
    assert sorted((b["model"], b["prompt"], b["max_tokens"]) for b in fake.bodies) == sorted(
        (r.model, r.prompt, r.max_tokens) for r in requests
    )
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in fake.bodies)
    assert sorted(fake.keys) == sorted(f"Bearer {'own' if r.tenant == 'tenant-1' else 'shared'}" for r in requests)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.error is None
        assert (outcome.index, outcome.completion_tokens) == (request.index, request.max_tokens)
        assert len(outcome.chunk_s) == request.max_tokens
        assert request.arrival_s == outcome.due_s <= outcome.sent_s <= outcome.chunk_s[0] <= outcome.done_s


async def test_open_loop_does_not_wait_for_answers() -> None:
    requests = [PlannedRequest(i, 0.001 * i, "late", "t", "hello", 2) for i in range(20)]
    async with serving() as (url, fake):
        fake.min_open = 20
        outcomes = await open_loop(Endpoint(url), requests)
    assert fake.max_open == 20
    assert all(outcome.error is None and outcome.ttft_s > 0.04 for outcome in outcomes)


async def test_closed_loop_keeps_its_number_of_streams() -> None:
    requests = plan(CONFIG, ["a"])
    async with serving() as (url, fake):
        fake.min_open = 4
        outcomes = await closed_loop(Endpoint(url), requests, 4)
    assert fake.max_open == 4
    assert [outcome.index for outcome in outcomes] == list(range(30))


async def test_failures_are_outcomes() -> None:
    requests = [PlannedRequest(i, 0.0, model, "t", "x", 3) for i, model in enumerate(["refuse", "break", "a"])]
    async with serving() as (url, _):
        refused, broken, good = await open_loop(Endpoint(url), requests)
    assert refused.error is not None
    assert "429" in refused.error
    assert "too busy" in refused.error
    assert broken.error == "the stream ended without [DONE]"
    assert good.error is None
    (unreachable,) = await open_loop(Endpoint("http://127.0.0.1:9/v1"), requests[:1])
    assert unreachable.error is not None
    assert "Connect" in unreachable.error


def test_smoke_from_the_command_line(server: tuple[str, FakeServer], tmp_path: Path) -> None:
    url, fake = server
    names = tmp_path / "names.txt"
    names.write_text("sql\nextract\nsupport\n")
    out = tmp_path / "deep" / "smoke"
    main([
        *("--url", url, "--models", f"@{names}", "--requests", "40", "--rate", "400", "--seed", "5"),
        *("--arrivals", "gamma:2", "--popularity", "zipf:1.2", "--output-lengths", "uniform:1:5", "--out", str(out)),
        *("--tenants", "3", "--adversary-factor", "5", "--slo-ttft", "30", "--shared-prefix-words", "4"),
    ])  # fmt: skip
    lines = [json.loads(line) for line in Path(f"{out}.jsonl").read_text().splitlines()]
    config, summary = lines[0], lines[-1]
    assert config["workload"]["arrivals"] == "gamma:2"
    assert config["slo"] == {"ttft_s": 30.0, "tpot_s": None, "e2e_s": None}
    assert (summary["num_requests"], summary["num_failed"], summary["slo_attainment"]) == (40, 0, 1.0)
    assert summary["completion_tokens"] == sum(body["max_tokens"] for body in fake.bodies)
    assert len(summary["tenants"]) == 3
    assert config["models"] == ["sql", "extract", "support"]
    assert "Objectives met by 100.0 %" in Path(f"{out}.md").read_text()
    assert Path(f"{out}.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_any_answer_fails(server: tuple[str, FakeServer], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1"):
        main([
            *("--url", server[0], "--models", "refuse", "--requests", "3", "--rate", "300"),
            *("--out", str(tmp_path / "x")),
        ])  # fmt: skip
    assert not (tmp_path / "x.png").exists()
