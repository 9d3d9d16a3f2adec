"""Capacity planning: how many replicas some traffic needs, and which limit one replica fewer runs into.

The number is found by simulation with the service's own decisions, by doubling and bisection, assuming that more
replicas are never worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from app.engine.errors import ConfigError
from app.engine.pools.adapter_pool import rows_of
from app.simulation.fleet import Plan, simulate
from app.simulation.result import Result, percentile
from app.simulation.traffic import BASE, Traffic


@dataclass(frozen=True, slots=True)
class Need:
    """The smallest fleet that meets the objective. `first_limit`: what a smaller one lacks.

    ttft_s: at the requested percentile; rank_rows: most rows in use on a replica at a time; host_bytes: of all
    requested adapters.
    """

    num_replicas: int
    ttft_s: float
    hit_rate: float
    rank_rows: int
    host_bytes: int
    first_limit: str


def plan_fleet(traffic: Traffic, plan: Plan, slo_ttft_s: float, at_percentile: float, max_replicas: int) -> Need:
    """Raises ConfigError if `max_replicas` do not meet the objective."""

    def result(num_replicas: int) -> Result:
        return simulate(traffic, replace(plan, num_replicas=num_replicas), seed=0)

    def meets(found: Result) -> bool:
        return percentile(found.first_token_s, at_percentile) <= slo_ttft_s

    too_few, enough = 0, 1  # `too_few` does not meet the objective; `enough` is tried, then meets it
    found = result(enough)
    while not meets(found):
        if enough >= max_replicas:
            ttft_s = percentile(found.first_token_s, at_percentile)
            raise ConfigError(
                f"{enough} replicas have their first tokens after {ttft_s:.3f} s (p{at_percentile:g}), which is "
                f"more than {slo_ttft_s:g} s: {_limit(found, plan)}. Raise --max-replicas or the objective"
            )
        too_few, enough = enough, min(2 * enough, max_replicas)
        found = result(enough)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        attempt = result(middle)
        if meets(attempt):
            enough, found = middle, attempt
        else:
            too_few = middle
    requested = np.unique(traffic.adapter[traffic.adapter != BASE])
    smaller = result(enough - 1) if enough > 1 else None
    summary = found.summary()
    return Need(
        enough,
        percentile(found.first_token_s, at_percentile),
        summary["hit_rate"],
        max((tick.num_rows for tick in found.ticks), default=0),
        math.ceil(float(traffic.rank[requested].sum()) * plan.costs.row_bytes),
        "nothing: one replica is enough" if smaller is None else _limit(smaller, plan),
    )


def _limit(result: Result, plan: Plan) -> str:
    """The limit that replicas were at for most of the time."""
    size = plan.size
    smallest = rows_of(int(result.traffic.rank.min()), size.rank_alignment) if result.traffic.num_adapters else 0
    parts = {
        f"rank rows (engine.lora_pool_rows {size.lora_pool_rows})": [
            tick.num_rows + smallest > size.lora_pool_rows and smallest > 0 for tick in result.ticks
        ],
        f"sequences in a batch (engine.max_num_seqs {size.max_num_seqs})": [
            tick.num_running >= size.max_num_seqs for tick in result.ticks
        ],
        f"KV memory ({size.kv_tokens} tokens)": [tick.kv_used > 0.95 for tick in result.ticks],
    }
    fractions = {name: sum(reached) / max(len(reached), 1) for name, reached in parts.items()}
    name = max(fractions, key=fractions.__getitem__)
    if fractions[name] < 0.02:
        return "computing: steps and prompts take the time, no limit is reached"
    return f"{name}: reached by a replica in {100 * fractions[name]:.0f} % of the seconds"
