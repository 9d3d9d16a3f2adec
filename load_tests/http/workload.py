"""The plan of a load test: all requests, decided before anything is sent.

The same seed gives the same list of `PlannedRequest`. Arrivals, popularity, lengths, prefixes and tenants draw from
separate streams of the seed, so changing one leaves the others as they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.simulation.trace import MOST_TOKENS, TraceEntry
from load_tests.arrivals import arrival_times
from load_tests.http.lengths import lengths, words
from load_tests.popularity import adapter_indices


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """`shared_prefix_words` are the first ones of every prompt of one model and count as part of its length; at
    least one word of its own follows. With `num_tenants` of at least two and `adversary_factor` above 1 the
    last tenant sends that many times what each other one sends; `rate` is what all of them send together."""

    seed: int = 0
    num_requests: int = 100
    rate: float = 2.0
    arrivals: str = "poisson"
    popularity: str = "zipf:1"
    base_share: float = 0.0
    prompt_lengths: str = "fixed:64"
    output_lengths: str = "fixed:64"
    shared_prefix_words: int = 0
    num_tenants: int = 1
    adversary_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send at `arrival_s` after the start."""

    index: int
    arrival_s: float
    model: str
    tenant: str
    prompt: str
    max_tokens: int


def plan(
    config: WorkloadConfig, models: Sequence[str], base_model: str | None = None, trace: Sequence[TraceEntry] = ()
) -> list[PlannedRequest]:
    """`models` in order of popularity. `base_share` of the requests go to `base_model`. A trace's own
    fields win over what is drawn, and its length over `num_requests`. ValueError for a bad configuration."""
    _check(config, base_model)
    streams = np.random.SeedSequence(config.seed).spawn(8)
    arrival_rng, adapter_rng, prompt_rng, output_rng, text_rng, prefix_rng, tenant_rng, base_rng = map(
        np.random.default_rng, streams
    )
    count = len(trace) or config.num_requests
    times = (
        np.array([entry.arrival_s for entry in trace])
        if trace
        else arrival_times(config.arrivals, config.rate, count, arrival_rng)
    )
    chosen = adapter_indices(config.popularity, len(models), times, adapter_rng)
    is_base = base_rng.random(count) < config.base_share
    prompt_lengths = lengths(config.prompt_lengths, count, prompt_rng)
    output_lengths = lengths(config.output_lengths, count, output_rng)
    weights = np.ones(config.num_tenants)
    if config.num_tenants > 1:
        weights[-1] = config.adversary_factor
    tenants = tenant_rng.choice(config.num_tenants, size=count, p=weights / weights.sum())
    prefixes: dict[str, str] = {}
    if config.shared_prefix_words:
        for name in filter(None, (*models, base_model, *(entry.model for entry in trace))):
            if name not in prefixes:
                prefixes[name] = words(config.shared_prefix_words, prefix_rng) + " "

    requests = []
    for i, entry in enumerate(trace or [TraceEntry(float(t)) for t in times]):
        model = entry.model or (base_model if is_base[i] and base_model is not None else models[chosen[i]])
        own = max(1, (entry.prompt_tokens or int(prompt_lengths[i])) - config.shared_prefix_words)
        requests.append(
            PlannedRequest(
                index=i,
                arrival_s=entry.arrival_s,
                model=model,
                tenant=entry.tenant or f"tenant-{tenants[i]}",
                prompt=prefixes.get(model, "") + words(own, text_rng),
                max_tokens=entry.output_tokens or int(output_lengths[i]),
            )
        )
    return requests


def _check(config: WorkloadConfig, base_model: str | None) -> None:
    least = {"seed": 0, "num_requests": 1, "shared_prefix_words": 0, "num_tenants": 1, "adversary_factor": 1}
    if config.shared_prefix_words > MOST_TOKENS:
        raise ValueError(f"shared_prefix_words is {config.shared_prefix_words} but must be at most {MOST_TOKENS}")
    for name, least_value in least.items():
        if not least_value <= getattr(config, name) < math.inf:
            raise ValueError(f"{name} is {getattr(config, name)} but must be a number of at least {least_value}")
    if not 0 <= config.base_share <= 1:
        raise ValueError(f"base_share is {config.base_share} but must be from 0 to 1")
    if (config.base_share > 0) != (base_model is not None):
        raise ValueError(
            f"base_share is {config.base_share} and base_model is {base_model}: requests for a base need both"
        )
    if config.adversary_factor > 1 and config.num_tenants == 1:
        raise ValueError(f"adversary_factor is {config.adversary_factor} but there is one tenant; give num_tenants too")
