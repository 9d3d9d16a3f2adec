"""Summaries of outcomes: percentiles, rates, goodput; as a dictionary, JSON lines and Markdown.

A failed request counts against attainment and goodput and has no latency. Percentiles are linear between ranks (NumPy's
default). Rates are over the time from the first due request to the last good answer, or to the last due request if that
is later: one that hangs until its timeout does not thin out the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from load_tests.http.client import Outcome

PERCENTILES = (50, 90, 95, 99)

#: Different errors in the report; the JSON lines have them all.
MOST_ERRORS = 10

#: Summary key → what it is called in the report.
LATENCIES = {
    "ttft_s": "first token",
    "gap_s": "between chunks",
    "tpot_s": "per output token",
    "e2e_s": "end to end",
    "lag_s": "sent late by",
}


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives in seconds; a request meets them if it succeeds within every one that is set."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        if outcome.error is not None:
            return False
        values = (outcome.ttft_s, outcome.tpot_s, outcome.e2e_s)
        limits = (self.ttft_s, self.tpot_s, self.e2e_s)
        return all(limit is None or value <= limit for value, limit in zip(values, limits, strict=True))


def summarise(outcomes: Sequence[Outcome], slo: Slo, num_unfinished: int = 0) -> dict[str, Any]:
    """Numbers of one run, with one entry per tenant. Of `num_unfinished` requests nothing is known: the run was
    broken off. ValueError for no outcomes."""
    if not outcomes:
        raise ValueError("no outcomes to summarise; send at least one request")
    summary = {"num_unfinished": num_unfinished, "slo": asdict(slo), **_numbers(outcomes, slo, _span_s(outcomes))}
    tenants = sorted({outcome.tenant for outcome in outcomes})
    if len(tenants) > 1:
        summary["tenants"] = {
            tenant: _numbers([o for o in outcomes if o.tenant == tenant], slo, _span_s(outcomes)) for tenant in tenants
        }
    summary["errors"] = _counts(outcome.error for outcome in outcomes if outcome.error is not None)
    summary["models"] = _counts(outcome.model for outcome in outcomes)
    return summary


def _span_s(outcomes: Sequence[Outcome]) -> float:
    """See the module; without any good answer until the last request ended."""
    good = [outcome.done_s for outcome in outcomes if outcome.error is None]
    ends = [*good, *(outcome.due_s for outcome in outcomes)] if good else [outcome.done_s for outcome in outcomes]
    return max(ends) - min(outcome.due_s for outcome in outcomes)


def _numbers(outcomes: Sequence[Outcome], slo: Slo, span_s: float) -> dict[str, Any]:
    good = [outcome for outcome in outcomes if outcome.error is None]
    is_met = [outcome for outcome in good if slo.is_met(outcome)]
    return {
        "num_requests": len(outcomes),
        "num_failed": len(outcomes) - len(good),
        "span_s": span_s,
        "requests_per_s": len(good) / span_s,
        "prompt_tokens": sum(o.prompt_tokens for o in good),
        "completion_tokens": sum(o.completion_tokens for o in good),
        "tokens_per_s": sum(o.completion_tokens for o in good) / span_s,
        "slo_attainment": len(is_met) / len(outcomes),
        "goodput_requests_per_s": len(is_met) / span_s,
        "goodput_tokens_per_s": sum(o.completion_tokens for o in is_met) / span_s,
        "ttft_s": percentiles([o.ttft_s for o in good]),
        "gap_s": percentiles([gap for o in good for gap in o.gaps_s]),
        "tpot_s": percentiles([o.tpot_s for o in good if o.completion_tokens > 1]),
        "e2e_s": percentiles([o.e2e_s for o in good]),
        "lag_s": percentiles([o.sent_s - o.due_s for o in outcomes]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50 to p99 and maximum; None for no values."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(np.max(values))}


def _counts(values: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def json_line(kind: str, values: Mapping[str, Any] | Outcome) -> str:
    """One line of a run's file: its `config`, a `request`, its `summary`."""
    return json.dumps({"kind": kind, **(asdict(values) if isinstance(values, Outcome) else values)}) + "\n"


def markdown(title: str, summary: Mapping[str, Any]) -> str:
    """A report of one page: rates, latencies in milliseconds, tenants, errors."""
    failed = f", {summary['num_failed']} failed" if summary["num_failed"] else ""
    broken_off = [
        f"Broken off: {summary['num_unfinished']} more requests had not ended and are in none of these numbers.",
        "",
    ]
    lines = [
        f"## {title}",
        "",
        *(broken_off if summary["num_unfinished"] else ()),
        f"{summary['num_requests']} requests{failed} in {summary['span_s']:.1f} s: "
        f"{summary['requests_per_s']:.2f} requests/s, {summary['tokens_per_s']:.1f} tokens/s.",
        f"{_attainment(summary)}: goodput "
        f"{summary['goodput_requests_per_s']:.2f} requests/s, {summary['goodput_tokens_per_s']:.1f} tokens/s.",
        "",
        "| ms | mean | " + " | ".join(f"p{p}" for p in PERCENTILES) + " | max |",
        "|---|" + "---:|" * (len(PERCENTILES) + 2),
        *(_latency_row(name, summary[key]) for key, name in LATENCIES.items()),
    ]
    if tenants := summary.get("tenants"):
        lines += [
            "",
            "| tenant | requests | failed | objectives met | first token p50, ms | p99 | tokens/s |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name, numbers in tenants.items():
            ttft = numbers["ttft_s"]
            cells = [f"{1000 * ttft[p]:.0f}" for p in ("p50", "p99")] if ttft else ["", ""]
            lines.append(
                f"| {name} | {numbers['num_requests']} | {numbers['num_failed']} | "
                f"{100 * numbers['slo_attainment']:.1f} % | {cells[0]} | {cells[1]} | {numbers['tokens_per_s']:.1f} |"
            )
    if summary["errors"]:
        shown = list(summary["errors"].items())[:MOST_ERRORS]
        lines += ["", "Errors:", *(f"- {count} × {' '.join(error.split())}" for error, count in shown)]
        if more := len(summary["errors"]) - len(shown):
            lines.append(f"- and {more} others, in the JSON lines")
    return "\n".join(lines) + "\n"


def _attainment(summary: Mapping[str, Any]) -> str:
    named = [f"{LATENCIES[key]} {limit:g} s" for key, limit in summary["slo"].items() if limit is not None]
    share = f"{100 * summary['slo_attainment']:.1f} % of requests"
    return f"Objectives ({', '.join(named)}) met by {share}" if named else f"No objectives were set, {share} succeeded"


def _latency_row(name: str, values: Mapping[str, float] | None) -> str:
    keys = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    cells = [f"{1000 * values[key]:.1f}" for key in keys] if values else [""] * len(keys)
    return f"| {name} | " + " | ".join(cells) + " |"
