"""Report arithmetic on outcomes worked out by hand."""

from __future__ import annotations

import json

import pytest

from load_tests.http.client import Outcome
from load_tests.http.report import Slo, json_line, markdown, percentiles, summarise


def outcome(index: int, due_s: float, chunk_s: list[float], tokens: int, tenant: str = "t") -> Outcome:
    return Outcome(index, "m", tenant, due_s, due_s + 0.01, chunk_s, chunk_s[-1], 5, tokens)


FAST = outcome(0, 1.0, [1.2, 1.3, 1.5], 5)
SLOW = outcome(1, 2.0, [4.0, 5.0], 2, "slow")
FAILED = Outcome(2, "m", "t", 3.0, 3.5, [3.6], 6.0, error="HTTP 500: no")


def test_one_requests_latencies() -> None:
    assert FAST.ttft_s == pytest.approx(0.2)
    assert FAST.e2e_s == pytest.approx(0.5)
    assert FAST.tpot_s == pytest.approx(0.3 / 4)
    assert FAST.gaps_s == pytest.approx([0.1, 0.2])


def test_rates_and_goodput() -> None:
    summary = summarise([FAST, SLOW, FAILED], Slo(ttft_s=1.0))
    assert summary["span_s"] == pytest.approx(4.0)  # from 1.0 to 5.0: a failed request's end is no answer
    assert (summary["num_requests"], summary["num_failed"]) == (3, 1)
    assert summary["tokens_per_s"] == pytest.approx(7 / 4)
    assert summary["slo_attainment"] == pytest.approx(1 / 3)
    assert summary["goodput_requests_per_s"] == pytest.approx(1 / 4)
    assert summary["goodput_tokens_per_s"] == pytest.approx(5 / 4)
    assert summary["ttft_s"]["max"] == pytest.approx(2.0)
    assert summary["errors"] == {"HTTP 500: no": 1}
    assert summary["tenants"]["slow"]["slo_attainment"] == 0
    assert summary["tenants"]["t"]["num_failed"] == 1


def test_rates_are_over_the_time_in_which_requests_were_due_and_answered() -> None:
    hanging = Outcome(2, "m", "t", 3.0, 3.0, done_s=603.0, error="no complete answer within 600 s")
    late = Outcome(3, "m", "t", 9.0, 9.0, done_s=9.1, error="HTTP 500: no")
    assert summarise([FAST, SLOW, hanging], Slo())["span_s"] == pytest.approx(4.0)
    assert summarise([FAST, SLOW, hanging, late], Slo())["span_s"] == pytest.approx(8.0)
    assert summarise([hanging, late], Slo())["span_s"] == pytest.approx(600.0)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.21, tpot_s=0.08, e2e_s=0.51), True),
        (Slo(ttft_s=0.19), False),
        (Slo(tpot_s=0.07), False),
        (Slo(e2e_s=0.49), False),
    ],
)
def test_every_objective_counts(slo: Slo, met: bool) -> None:
    assert slo.is_met(FAST) is met
    assert not slo.is_met(FAILED)


def test_percentiles_are_linear_between_ranks() -> None:
    found = percentiles(list(range(101)))
    assert found is not None
    assert (found["p50"], found["p90"], found["p99"], found["max"], found["mean"]) == (50, 90, 99, 100, 50)
    assert percentiles([]) is None


def test_nothing_sent_is_an_error() -> None:
    with pytest.raises(ValueError, match="no outcomes"):
        summarise([], Slo())


def test_all_failed_still_makes_a_report() -> None:
    summary = summarise([FAILED], Slo())
    assert summary["ttft_s"] is None
    assert "1 × HTTP 500: no" in markdown("nothing works", summary)


def test_a_report_of_many_errors_stays_short() -> None:
    failed = [Outcome(i, "m", "t", 3.0, 3.5, done_s=6.0, error=f"HTTP 500:\n {i}") for i in range(14)]
    text = markdown("much goes wrong", summarise(failed, Slo()))
    assert text.count("1 × HTTP 500: ") == 10
    assert "and 4 others" in text


def test_json_lines_and_markdown() -> None:
    summary = summarise([FAST, SLOW], Slo(ttft_s=1.0))
    assert json.loads(json_line("config", {"seed": 3})) == {"kind": "config", "seed": 3}
    request = json.loads(json_line("request", FAST))
    assert (request["kind"], request["index"], request["chunk_s"]) == ("request", 0, FAST.chunk_s)
    text = markdown("two requests", summary)
    assert "Objectives (first token 1 s) met by 50.0 % of requests" in text
    assert "No objectives were set, 100.0 % of requests succeeded: goodput" in markdown("x", summarise([FAST], Slo()))
    assert "| first token | 1100.0 | 1100.0 |" in text
    assert "| slow | 1 | 0 | 0.0 % | 2000 | 2000 |" in text
