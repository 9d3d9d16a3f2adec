"""What is going to be sent, decided before anything is sent.

In: a `WorkloadConfig` and the models (adapters) to ask for. Out: a list of `PlannedRequest`, the same for the same
seed. Arrivals, popularity, lengths, prefixes and tenants draw from separate streams of the seed, so
changing one leaves the others as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from load_tests.arrivals import TraceEntry, arrival_times
from load_tests.lengths import lengths, words
from load_tests.popularity import adapter_indices


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """`shared_prefix_words` stand in front of every prompt of one model. With `num_tenants` of at least two and
    `adversary_factor` above 1 the last tenant sends that many times what each other one sends."""

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
    if not 0 <= config.base_share <= 1 or (config.base_share > 0 and base_model is None):
        raise ValueError(f"base_share is {config.base_share}: give a share from 0 to 1, and --base-model if above 0")
    if config.num_tenants < 1 or config.adversary_factor < 1:
        raise ValueError(
            f"num_tenants {config.num_tenants} and adversary_factor {config.adversary_factor} must be at least 1"
        )
    streams = np.random.SeedSequence(config.seed).spawn(7)
    arriving, choosing, asking, answering, writing, prefixing, owning = map(np.random.default_rng, streams)
    count = len(trace) or config.num_requests
    times = (
        np.array([entry.arrival_s for entry in trace])
        if trace
        else arrival_times(config.arrivals, config.rate, count, arriving)
    )
    chosen = adapter_indices(config.popularity, len(models), times, choosing)
    is_base = choosing.random(count) < config.base_share
    prompt_lengths = lengths(config.prompt_lengths, count, asking)
    output_lengths = lengths(config.output_lengths, count, answering)
    weights = np.ones(config.num_tenants)
    if config.num_tenants > 1:
        weights[-1] = config.adversary_factor
    tenants = owning.choice(config.num_tenants, size=count, p=weights / weights.sum())
    prefixes: dict[str, str] = {}

    requests = []
    for i, entry in enumerate(trace or [TraceEntry(float(t)) for t in times]):
        model = entry.model or (base_model if is_base[i] and base_model is not None else models[chosen[i]])
        if config.shared_prefix_words and model not in prefixes:
            prefixes[model] = words(config.shared_prefix_words, prefixing) + " "
        own = max(1, (entry.prompt_tokens or int(prompt_lengths[i])) - config.shared_prefix_words)
        requests.append(
            PlannedRequest(
                index=i,
                arrival_s=entry.arrival_s,
                model=model,
                tenant=entry.tenant or f"tenant-{tenants[i]}",
                prompt=prefixes.get(model, "") + words(own, writing),
                max_tokens=entry.output_tokens or int(output_lengths[i]),
            )
        )
    return requests
