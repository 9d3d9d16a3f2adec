"""When requests arrive: seeded point processes, and the replay of a trace file.

In: a spec on the command line such as `poisson`, `gamma:2`, `onoff:10:5`, and a mean rate. Out: arrival
times in seconds from the start, ascending. Open loop: times never depend on how the server answers.

- `constant`: one every 1/rate.
- `poisson`: independent arrivals.
- `gamma:CV`: gamma-distributed gaps with coefficient of variation CV; 1 is Poisson, above 1 is bursty.
- `onoff:ON:OFF`: Poisson for ON seconds, silence for OFF seconds, and so on; the mean rate stays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: No server takes more tokens in one request, and no client should make such prompts by a slip.
MOST_TOKENS = 1_000_000

KINDS = "constant, poisson, gamma:CV, onoff:ON_S:OFF_S"


def arrival_times(spec: str, rate: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """`count` times in seconds, `rate` per second on average. ValueError for a spec not understood."""
    if not 0 < rate < math.inf:
        raise ValueError(f"the rate is {rate} requests/s but must be a number above 0")
    kind, numbers = split_spec(spec)
    match kind, numbers:
        case "constant", []:
            return np.arange(count) / rate
        case "poisson", []:
            return np.cumsum(rng.exponential(1 / rate, count))
        case "gamma", [cv] if cv > 0:
            if not 1e-3 <= cv <= 1e3:
                raise ValueError(f"{spec!r}: a coefficient of variation must be from 0.001 to 1000")
            shape = cv**-2
            return np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))
        case "onoff", [on_s, off_s] if on_s > 0 and off_s >= 0:
            # A Poisson process in "on time", stretched over the silences.
            busy = np.cumsum(rng.exponential(on_s / (rate * (on_s + off_s)), count))
            times: NDArray[np.float64] = busy + np.floor(busy / on_s) * off_s
            return times
    raise ValueError(f"arrival process {spec!r} is not one of {KINDS}")


def split_spec(spec: str) -> tuple[str, list[float]]:
    """'gamma:2' -> ('gamma', [2.0]). ValueError where something after the name is not a finite number."""
    kind, *rest = spec.split(":")
    numbers = []
    for text in rest:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{spec!r}: {text!r} is not a number")
        numbers.append(number)
    return kind, numbers


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
