"""Recorded requests: one JSON object a line.

In: lines. Out: `TraceEntry`s. Rule: what is not understood is an error that names its line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: No server takes more tokens in one request, and no client should make such prompts by a slip.
MOST_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One line of a trace. What is None is drawn as if there were no trace. ValueError for a field that is no
    such value: a time below 0, a length below 1 or above `MOST_TOKENS`, an empty name."""

    arrival_s: float
    model: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        if type(self.arrival_s) not in (int, float) or not 0 <= self.arrival_s < math.inf:
            raise ValueError(f"arrival_s is {self.arrival_s!r} but must be a number of seconds from 0")
        for name in ("prompt_tokens", "output_tokens"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or not 1 <= count <= MOST_TOKENS):
                raise ValueError(f"{name} is {count!r} but must be a whole number from 1 to {MOST_TOKENS}")
        for name in ("model", "tenant"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise ValueError(f"{name} is {text!r} but must be a name")


def read_trace(lines: Iterable[str], source: Path | str = "trace") -> list[TraceEntry]:
    """JSON lines with `arrival_s` and any of the other fields of `TraceEntry`, in order of arrival.

    ValueError names the line that is not understood: an unknown field is one, a time that goes back too. A
    trace without any request is one as well.
    """
    entries: list[TraceEntry] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = TraceEntry(**json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:  # RecursionError: deep JSON
            raise ValueError(f"{source}, line {number}: {error}") from error
        if entries and entry.arrival_s < entries[-1].arrival_s:
            raise ValueError(f"{source}, line {number}: arrival_s {entry.arrival_s} is before the line above; sort it")
        entries.append(entry)
    if not entries:
        raise ValueError(f"{source} holds no request: one JSON object a line, with arrival_s at least")
    return entries
