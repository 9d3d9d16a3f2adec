"""Seeded point processes: arrival times in seconds from the start, ascending.

A spec such as `poisson`, `gamma:2` or `onoff:10:5` and a mean rate define one. Open loop: times never depend on the
server's answers. Traces are read by `app.simulation.trace`.

- `constant`: one every 1/rate.
- `poisson`: independent arrivals.
- `gamma:CV`: gamma-distributed gaps with coefficient of variation CV; 1 is Poisson, above 1 is bursty.
- `onoff:ON:OFF`: Poisson for ON seconds, silence for OFF seconds, and so on, with the same mean rate.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

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
