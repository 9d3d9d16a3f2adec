"""The whole generator against a tiny server: seeded, from the command line's options to the files."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from openai.types.completion_create_params import CompletionCreateParamsBase, CompletionCreateParamsStreaming

from load_tests.http import client
from load_tests.http.client import Endpoint, closed_loop, open_loop
from load_tests.http.run import main
from load_tests.http.workload import PlannedRequest, WorkloadConfig, plan
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


@pytest.mark.parametrize(
    "odd",
    [
        None,
        [],
        7,
        {"choices": [3]},
        {"usage": {"tokens": 3}},
        {"usage": {"prompt_tokens": []}},
        {"usage": {"prompt_tokens": math.inf}},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 1e300}},
        {"usage": {"prompt_tokens": 3, "completion_tokens": -3}},
        pytest.param("[" * 100_000, id="deep"),
        pytest.param('"' + "x" * 1_000_000, id="long"),
    ],
)
async def test_an_odd_event_is_a_failure_of_its_request_alone(odd: object) -> None:
    requests = [PlannedRequest(i, 0.0, model, "t", "x", 3) for i, model in enumerate(["odd", "a"])]
    async with serving() as (url, _):
        strange, good = await open_loop(Endpoint(url, extra_body={"odd": odd}), requests)
    assert strange.error is not None
    assert "not a stream of completions" in strange.error
    assert good.error is None


async def test_an_error_that_is_null_is_none() -> None:
    request = PlannedRequest(0, 0.0, "odd", "t", "x", 3)
    async with serving() as (url, _):
        (outcome,) = await open_loop(Endpoint(url, extra_body={"odd": {"error": None, "choices": None}}), [request])
    assert outcome.error is None


async def test_an_answer_of_no_tokens_is_one() -> None:
    async with serving() as (url, _):
        (outcome,) = await open_loop(Endpoint(url), [PlannedRequest(0, 0.0, "silent", "t", "x", 1)])
    assert (outcome.error, outcome.completion_tokens) == (None, 0)


@pytest.mark.parametrize("model", ["held", "reset"])
async def test_an_answer_ends_with_done(model: str) -> None:
    async with serving() as (url, _):
        (outcome,) = await open_loop(Endpoint(url, timeout_s=60), [PlannedRequest(0, 0.0, model, "t", "x", 3)])
    assert outcome.error is None
    assert outcome.chunk_s[-1] <= outcome.done_s < 50


async def test_a_connection_is_used_again() -> None:
    async with serving() as (url, fake):
        outcomes = await closed_loop(Endpoint(url), plan(CONFIG, ["a"]), 1)
    assert all(outcome.error is None for outcome in outcomes)
    assert len(fake.clients) == 1


async def test_a_timeout_is_not_rounded() -> None:
    async with client._session(Endpoint("http://127.0.0.1:9/v1", timeout_s=7.3)) as session:
        assert session.timeout.total == 7.3
        assert session.timeout.ceil_threshold > 7.3


async def test_an_answer_that_does_not_come_is_named() -> None:
    async with serving() as (url, _):
        (outcome,) = await open_loop(Endpoint(url, timeout_s=0.2), [PlannedRequest(0, 0.0, "never", "t", "x", 1)])
    assert outcome.error == "no complete answer within 0.2 s"


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
    assert "Objectives (first token 30 s) met by 100.0 %" in Path(f"{out}.md").read_text()
    assert Path(f"{out}.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_any_answer_fails(server: tuple[str, FakeServer], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1"):
        main([
            *("--url", server[0], "--models", "refuse", "--requests", "3", "--rate", "300"),
            *("--out", str(tmp_path / "x")),
        ])  # fmt: skip
    assert not (tmp_path / "x.png").exists()


def test_nothing_beyond_openais_fields_is_sent(server: tuple[str, FakeServer], tmp_path: Path) -> None:
    """Other servers refuse, or ignore, what they do not know."""
    main(["--url", server[0] + "/", "--models", "a", "--requests", "1", "--out", str(tmp_path / "x")])
    (body,) = server[1].bodies
    openais = (CompletionCreateParamsBase, CompletionCreateParamsStreaming)
    assert set(body) <= {name for part in openais for name in part.__annotations__}


def test_an_older_runs_report_does_not_stay(server: tuple[str, FakeServer], tmp_path: Path) -> None:
    for suffix in ("jsonl", "md", "png"):
        (tmp_path / f"x.{suffix}").write_text("older\n")
    options = ["--requests", "1", "--rate", "1000", "--out", str(tmp_path / "x")]
    with pytest.raises(SystemExit, match="1"):
        main(["--url", server[0], "--models", "refuse", *options])
    assert not (tmp_path / "x.png").exists()
    assert "older" not in (tmp_path / "x.md").read_text() + (tmp_path / "x.jsonl").read_text()


@pytest.mark.parametrize("suffix", ["jsonl", "md", "png"])
def test_files_that_cannot_be_written_are_found_before_anything_is_sent(
    suffix: str, server: tuple[str, FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"x.{suffix}").mkdir()
    kept = tmp_path / ("x.md" if suffix == "jsonl" else "x.jsonl")
    kept.write_text("older\n")
    with pytest.raises(SystemExit, match="2"):
        main(["--url", server[0], "--models", "a", "--requests", "1", "--out", str(tmp_path / "x")])
    assert f"x.{suffix}" in capsys.readouterr().err
    assert kept.read_text() == "older\n"
    assert not server[1].bodies


def test_a_report_that_nobody_reads_is_written_all_the_same(server: tuple[str, FakeServer], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "load_tests.http.run", "--url", server[0], "--models", "a", "--requests", "1"]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "x")], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "x.md").exists()
    assert (tmp_path / "x.png").exists()


def test_tenants_of_a_trace_have_keys(server: tuple[str, FakeServer], tmp_path: Path) -> None:
    trace, keys = tmp_path / "trace.jsonl", tmp_path / "keys.json"
    trace.write_text('{"arrival_s": 0, "tenant": "them"}\n{"arrival_s": 0}\n')
    keys.write_text('{"them": "theirs", "tenant-0": "first"}')
    main([
        *("--url", server[0], "--models", "a", "--trace", str(trace), "--api-keys", str(keys)),
        *("--out", str(tmp_path / "x")),
    ])  # fmt: skip
    assert sorted(server[1].keys) == ["Bearer first", "Bearer theirs"]
    assert "theirs" not in (tmp_path / "x.jsonl").read_text()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ('{"tenant-0": "a", "tenant-7": "b"}', "names 'tenant-7', but the tenants are tenant-0, tenant-1"),
        ('{"tenant-0": null}', "the key of 'tenant-0' must be text"),
        ('{"tenant-0": "hidden\\n"}', "the key of 'tenant-0' must be text"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(
    keys: str, words: str, server: tuple[str, FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys.json").write_text(keys)
    options = ["--tenants", "2", "--api-keys", str(tmp_path / "keys.json"), "--out", str(tmp_path / "x")]
    with pytest.raises(SystemExit, match="2"):
        main(["--url", server[0], "--models", "a", *options])
    error = capsys.readouterr().err
    assert words in error
    assert "hidden" not in error
    assert not server[1].bodies


def test_a_key_with_a_line_break_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hidden\n")
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "http://127.0.0.1:9/v1", "--models", "a", "--out", str(tmp_path / "x")])
    error = capsys.readouterr().err
    assert "OPENAI_API_KEY must be text without line breaks" in error
    assert "hidden" not in error


def test_a_trace_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b'{"arrival_s": 0}\n\xff\xfe\n')
    with pytest.raises(SystemExit, match="2"):
        main(["--url", "http://127.0.0.1:9/v1", "--models", "a", "--trace", str(trace), "--out", str(tmp_path / "x")])
    assert f"{trace}: 'utf-8' codec" in capsys.readouterr().err


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """As in a terminal: a shell's background jobs start with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_keeps_what_has_ended(server: tuple[str, FakeServer], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"arrival_s": 0, "model": m}) + "\n" for m in ["a", "refuse", "ctrl-c", "a"]))
    out = tmp_path / "x"
    with pytest.raises(SystemExit, match="130"):
        main([
            *("--url", server[0], "--models", "a", "--trace", str(trace), "--closed-loop", "1", "--out", str(out)),
        ])  # fmt: skip
    config, first, second, summary = (json.loads(line) for line in Path(f"{out}.jsonl").read_text().splitlines())
    assert (config["kind"], first["model"], second["model"]) == ("config", "a", "refuse")
    assert (summary["num_requests"], summary["num_unfinished"]) == (2, 2)
    assert "Broken off: 2 more requests" in Path(f"{out}.md").read_text()


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_before_anything_has_ended(server: tuple[str, FakeServer], tmp_path: Path) -> None:
    out = tmp_path / "x"
    with pytest.raises(SystemExit, match="130"):
        main(["--url", server[0], "--models", "ctrl-c", "--requests", "1", "--rate", "1000", "--out", str(out)])
    assert len(Path(f"{out}.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--popularity", "zipf"], "popularity 'zipf' is not one of"),
        (["--popularity", "zipf:x"], "'x' is not a number"),
        (["--arrivals", "gamma:inf"], "'inf' is not a number"),
        (["--prompt-lengths", "fixed:2.5"], "'fixed:2.5' is not one of"),
        (["--output-lengths", "lognormal:5:1:0"], "'lognormal:5:1:0' is not one of"),
        (["--requests", "0"], "num_requests is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--shared-prefix-words", "-4"], "shared_prefix_words is -4"),
        (["--rate", "nan"], "--rate: 'nan' is not a number above 0"),
        (["--timeout", "0"], "--timeout: '0' is not a number above 0"),
        (["--slo-ttft", "-1"], "--slo-ttft: '-1' is not a number above 0"),
        (["--closed-loop", "0"], "--closed-loop: '0' is not a whole number from 1"),
        (["--extra-body", "[1]"], "[1] is not a JSON object"),
        (["--closed-loop", "3", "--popularity", "hotset:1:1:60"], "by which --popularity hotset:1:1:60 turns"),
        (["--popularity", "hotset:3:0.5:60"], "a hot set of 3 adapters, but there are 1"),
        (["--arrivals", "gamma:1e-160"], "must be from 0.001 to 1000"),
        (["--prompt-lengths", "fixed:1e12"], "is above 1000000"),
        (["--extra-body", "[" * 100_000], "recursion"),
        (["--extra-body", "{"], "--extra-body: {: Expecting"),
        (["--api-keys", "/nowhere.json"], "No such file"),
        (["--models", "@/nowhere.txt"], "No such file"),
        (["--trace", "/nowhere.jsonl"], "No such file"),
        (["--trace", "/dev/null"], "/dev/null has no requests"),
        (["--url", "127.0.0.1:8000/v1"], "does not start with http://"),
        (["--adversary-factor", "5"], "there is one tenant"),
        (["--base-model", "b"], "requests for a base need both"),
        (["--base-share", "0.5"], "requests for a base need both"),
        (["--out", "/dev/null/x"], "--out /dev/null/x"),
    ],
)
def test_bad_options_are_refused_in_words(
    given: list[str], words: str, server: tuple[str, FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--url", server[0], "--models", "a", "--requests", "1", "--out", str(tmp_path / "x"), *given])
    assert words in capsys.readouterr().err
    assert not server[1].bodies
