"""The traffic of simulations: Dynamo's four scenarios, the alternating load, ranks and tenants.

Dynamo's numbers (lib/llm/tests/lora_simulation, 1.6): 8 workers with 4 slots, 100 adapters, Zipf 1.0, 200 ticks of 3 s:
(a) Poisson, 40 requests a tick; (b) diurnal, 10 to 50 and back in 100 ticks; (c) a flash crowd, 25, five times that at
ticks 50 and 130, half of the rest gone in 8 ticks; (d) a Markov chain over 15, 40 and 70. Within a tick requests come
at uniformly drawn times; theirs have no length, ours have that of `LENGTHS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from app.simulation.traffic import BASE, Traffic
from load_tests.popularity import adapter_indices

TICK_S = 3.0
NUM_TICKS = 200
NUM_ADAPTERS = 100
#: Mean prompt and answer tokens; both are geometric.
LENGTHS = (64, 32)
#: Ranks, and how often they are seen, of LoRAServe's traces: mostly small, with few large ones.
RANKS, RANK_PARTS = (8, 16, 32, 64, 128), (0.35, 0.3, 0.2, 0.1, 0.05)
#: When the crowds of `flash_crowd` come.
CROWDS_S = (150.0, 390.0)
_MMPP_RATES = (15.0, 40.0, 70.0)
_MMPP_MATRIX = ((0.9, 0.1, 0.0), (0.15, 0.8, 0.05), (0.1, 0.2, 0.7))

Rng = np.random.Generator


def poisson(rng: Rng) -> Traffic:
    return _from_ticks(np.full(NUM_TICKS, 40.0), rng)


def diurnal(rng: Rng) -> Traffic:
    ticks = np.arange(NUM_TICKS)
    return _from_ticks(30 - 20 * np.cos(2 * np.pi * ticks / 100), rng)


def flash_crowd(rng: Rng) -> Traffic:
    ticks = np.arange(NUM_TICKS)
    means = np.full(NUM_TICKS, 25.0)
    for start in (round(start_s / TICK_S) for start_s in CROWDS_S):
        means += np.where(ticks >= start, 4 * 25 * 0.5 ** ((ticks - start) / 8.0), 0.0)
    return _from_ticks(means, rng)


def mmpp(rng: Rng) -> Traffic:
    state, means = 0, []
    for _ in range(NUM_TICKS):
        means.append(_MMPP_RATES[state])
        state = int(rng.choice(3, p=_MMPP_MATRIX[state]))
    return _from_ticks(np.array(means), rng)


def alternating(rng: Rng, num_adapters: int = 4, num_ticks: int = 40, requests: int = 24) -> Traffic:
    """Two of four adapters get requests in one tick and the other two in the next, again and again."""
    times, adapters = [], []
    for tick in range(num_ticks):
        drawn = np.sort(rng.random(requests)) * TICK_S + tick * TICK_S
        times.append(drawn)
        adapters.append(2 * rng.integers(0, num_adapters // 2, requests) + tick % 2)
    arrival_s, adapter = np.concatenate(times), np.concatenate(adapters)
    return _traffic(arrival_s, adapter, np.full(num_adapters, 16), rng)


def ranks(rng: Rng) -> Traffic:
    """Poisson traffic for adapters of different ranks."""
    plain = _from_ticks(np.full(NUM_TICKS, 40.0), rng)
    drawn = rng.choice(RANKS, NUM_ADAPTERS, p=RANK_PARTS)
    return _traffic(plain.arrival_s, plain.adapter, drawn, rng)


def adversary(rng: Rng) -> Traffic:
    """Four tenants with a tenth of the traffic each; one has all the rest, and prompts that are four times longer."""
    plain = _from_ticks(np.full(NUM_TICKS, 40.0), rng)
    tenant = rng.choice(5, plain.num_requests, p=(0.6, 0.1, 0.1, 0.1, 0.1)).astype(np.int64)
    factor = np.where(tenant == 0, 4, 1)
    return Traffic(
        plain.arrival_s, plain.adapter, plain.prompt_tokens * factor, plain.output_tokens, tenant, plain.rank
    )


SCENARIOS: dict[str, Callable[[Rng], Traffic]] = {
    "poisson": poisson,
    "diurnal": diurnal,
    "flash crowd": flash_crowd,
    "mmpp": mmpp,
    "ranks": ranks,
    "adversary": adversary,
}


def shared_prefixes(rng: Rng, num_prefixes: int, rate: float, num_ticks: int = NUM_TICKS) -> Traffic:
    """Requests for the base, Poisson at `rate` a second, whose prompts begin with one of `num_prefixes` prefixes (Zipf
    1.0).

    Prefixes have 256 to 1,023 tokens, and the rest `LENGTHS`: system prompts, tools, documents.
    """
    count = rng.poisson(rate * TICK_S * num_ticks)
    arrival_s = np.sort(rng.random(count) * TICK_S * num_ticks)
    prefix = adapter_indices("zipf:1", num_prefixes, arrival_s, rng).astype(np.int64)
    prefix_tokens = rng.integers(256, 1024, num_prefixes)
    plain = _traffic(arrival_s, np.full(count, BASE), np.zeros(0, np.int64), rng)
    return replace(
        plain, prompt_tokens=plain.prompt_tokens + prefix_tokens[prefix], prefix=prefix, prefix_tokens=prefix_tokens
    )


def large(rng: Rng, num_requests: int, num_adapters: int, rate: float) -> Traffic:
    """Poisson arrivals at `rate` a second, Zipf 1.0 over many adapters."""
    arrival_s = np.cumsum(rng.exponential(1 / rate, num_requests))
    return _traffic(arrival_s, adapter_indices("zipf:1", num_adapters, arrival_s, rng), np.full(num_adapters, 16), rng)


def _from_ticks(means: NDArray[np.float64], rng: Rng) -> Traffic:
    """means [ticks]: requests expected in each."""
    counts = rng.poisson(means)
    starts = np.repeat(np.arange(len(means)) * TICK_S, counts)
    arrival_s = np.sort(starts + rng.random(int(counts.sum())) * TICK_S)
    return _traffic(arrival_s, adapter_indices("zipf:1", NUM_ADAPTERS, arrival_s, rng), np.full(NUM_ADAPTERS, 16), rng)


def _traffic(arrival_s: NDArray[np.float64], adapter: NDArray[np.int64], rank: NDArray[np.int64], rng: Rng) -> Traffic:
    count = len(arrival_s)
    prompt, output = LENGTHS
    return Traffic(
        arrival_s=arrival_s,
        adapter=adapter.astype(np.int64),
        prompt_tokens=rng.geometric(1 / prompt, count),
        output_tokens=rng.geometric(1 / output, count),
        tenant=np.zeros(count, np.int64),
        rank=rank.astype(np.int64),
    )
