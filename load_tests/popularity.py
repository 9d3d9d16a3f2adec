"""Popularity of adapters: which adapter each request is for, by seeded distributions of the literature.

Returns adapter indices [count], 0 the most popular.

- `uniform`: every adapter alike.
- `zipf:S`: adapter i with probability proportional to (i + 1)^-S.
- `powerlaw:A`: index floor(N u^(1/A)), u uniform: S-LoRA's power law (Sheng et al. 2023); smaller is more skewed.
- `hotset:SIZE:SHARE:PERIOD`: SHARE of the requests go to SIZE adapters, the rest to the others (of which there are none
  if SIZE is all of them); every PERIOD seconds the next SIZE are hot.
- Punica's four classes (Chen et al. 2023), which set the number of adapters by the number of requests:
  `distinct` (each request its own), `identical` (one for all), `skewed` (each adapter 1.5 times as
  popular as the next), `punica-uniform` (ceil(sqrt(count)) adapters alike).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from load_tests.arrivals import split_spec

KINDS = "uniform, zipf:S, powerlaw:A, hotset:SIZE:SHARE:PERIOD_S, distinct, identical, skewed[:RATIO], punica-uniform"

Indices = NDArray[np.int64]


def adapter_indices(spec: str, num_adapters: int, arrival_s: NDArray[np.float64], rng: np.random.Generator) -> Indices:
    """One index below `num_adapters` per arrival. ValueError for a spec not understood or too few adapters."""
    count = len(arrival_s)
    if num_adapters < 1:
        raise ValueError("popularity needs at least one adapter")
    kind, numbers = split_spec(spec)
    match kind, numbers:
        case "uniform", []:
            return rng.integers(0, num_adapters, count)
        case "zipf", [s] if s >= 0:
            return _draw_weighted(np.arange(1, num_adapters + 1, dtype=np.float64) ** -s, count, rng)
        case "powerlaw", [alpha] if alpha > 0:
            drawn = np.floor(num_adapters * rng.random(count) ** (1 / alpha)).astype(np.int64)
            return np.minimum(drawn, num_adapters - 1)
        case "hotset", [size, share, period_s] if size >= 1 and size.is_integer() and 0 <= share <= 1 and period_s > 0:
            if size > num_adapters:
                raise ValueError(f"{spec!r}: a hot set of {int(size)} adapters, but there are {num_adapters}")
            return _hot_set(int(size), share, period_s, num_adapters, arrival_s, rng)
        case "distinct", []:
            if num_adapters < count:
                raise ValueError(f"distinct needs one adapter per request: {count} requests, {num_adapters} adapters")
            return rng.permutation(count).astype(np.int64)
        case "identical", []:
            return np.zeros(count, np.int64)
        case "skewed", [] | [_]:
            ratio = numbers[0] if numbers else 1.5
            if ratio <= 1:
                raise ValueError(
                    f"skewed:{ratio}: each adapter must be more popular than the next; use a ratio above 1"
                )
            return _draw_weighted(ratio ** -np.arange(num_adapters, dtype=np.float64), count, rng)
        case "punica-uniform", []:
            num_needed = math.ceil(math.sqrt(count))
            if num_adapters < num_needed:
                raise ValueError(
                    f"punica-uniform needs {num_needed} adapters, the root of {count} requests, not {num_adapters}"
                )
            return rng.integers(0, num_needed, count)
    raise ValueError(f"popularity {spec!r} is not one of {KINDS}")


def _draw_weighted(weights: NDArray[np.float64], count: int, rng: np.random.Generator) -> Indices:
    return rng.choice(len(weights), size=count, p=weights / weights.sum()).astype(np.int64)


def _hot_set(
    size: int,
    share: float,
    period_s: float,
    num_adapters: int,
    arrival_s: NDArray[np.float64],
    rng: np.random.Generator,
) -> Indices:
    first = (arrival_s // period_s).astype(np.int64) * size
    hot = rng.integers(0, size, len(arrival_s))
    cold = rng.integers(size, num_adapters, len(arrival_s)) if size < num_adapters else hot
    return (first + np.where(rng.random(len(arrival_s)) < share, hot, cold)) % num_adapters
