"""The page of measured performance, from load_tests/results/*.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "load_tests" / "results"


def performance_page() -> str:
    """A section per result file: the claim, how it was measured, the table, what it means."""
    results = sorted((json.loads(path.read_text()) for path in RESULTS.glob("*.json")), key=lambda r: r["position"])
    return _PERFORMANCE_INTRO + "\n".join(_result(result) for result in results)


def _result(result: Mapping[str, Any]) -> str:
    first, *others = result["columns"]
    lines = [[first, *others], ["---", *(["---:"] * len(others))], *result["rows"]]
    rows = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    measured = f"Measured on {result['machine']}, {result['date']}: `{result['command']}`"
    return f"## {result['title']}\n\n{result['claim']}\n{measured}\n\n{rows}"


_PERFORMANCE_INTRO = """# Performance

Each table shows one claim, with the program that measured it. A ratio compares two values of the same interleaved
round; tables show the median of the rounds and, in brackets, the lowest and highest. Machines are shared, so ratios say
more than rates. References read the same model file and adapter folders and get the same prompts.
[Benchmark](../how-to/benchmark.md) says how to measure your own traffic.

"""
