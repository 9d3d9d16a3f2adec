"""Recorded requests: one JSON object per line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: Most tokens in one request; more are taken for a mistake.
MOST_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One line of a trace; fields that are None are drawn as without a trace. Raises ValueError for an invalid value: a
    negative time, a length outside 1 to `MOST_TOKENS`, an empty name.
    """

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
    """The entries of JSON lines with `arrival_s` and optional other fields of `TraceEntry`, in order of arrival.

    Raises ValueError with the line's number for an unknown field or a time that goes back, and for an empty trace.
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
            raise ValueError(
                f"{source}, line {number}: arrival_s {entry.arrival_s} is before that of the line above; sort the trace"
            )
        entries.append(entry)
    if not entries:
        raise ValueError(f"{source} has no requests; write one JSON object per line, with at least arrival_s")
    return entries
