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
    """The smallest fleet that meets the objective. `breaks_first`: what a smaller one lacks.

    ttft_s: at the requested percentile; rank_rows: most rows in use on a replica at a time; host_bytes: of all
    requested adapters.
    """

    num_replicas: int
    ttft_s: float
    hit_rate: float
    rank_rows: int
    host_bytes: int
    breaks_first: str


def plan_fleet(traffic: Traffic, plan: Plan, slo_ttft_s: float, at_percentile: float, max_replicas: int) -> Need:
    """Raises ConfigError if `max_replicas` do not meet the objective."""

    def result(num_replicas: int) -> Result:
        return simulate(traffic, replace(plan, num_replicas=num_replicas), seed=0)

    def keeps(found: Result) -> bool:
        return percentile(found.first_token_s, at_percentile) <= slo_ttft_s

    least, most = 0, 1  # `least` is too few; `most` is being tried
    found = result(most)
    while not keeps(found):
        if most >= max_replicas:
            ttft_s = percentile(found.first_token_s, at_percentile)
            raise ConfigError(
                f"{most} replicas have their first tokens after {ttft_s:.3f} s (p{at_percentile:g}), which is "
                f"more than {slo_ttft_s:g} s: {_limit(found, plan)}. Raise --max-replicas or the objective"
            )
        least, most = most, min(2 * most, max_replicas)
        found = result(most)
    while most - least > 1:
        middle = (least + most) // 2
        tried = result(middle)
        if keeps(tried):
            most, found = middle, tried
        else:
            least = middle
    wanted = np.unique(traffic.adapter[traffic.adapter != BASE])
    smaller = result(most - 1) if most > 1 else None
    summary = found.summary()
    return Need(
        most,
        percentile(found.first_token_s, at_percentile),
        summary["hit_rate"],
        max((tick.num_rows for tick in found.ticks), default=0),
        math.ceil(float(traffic.rank[wanted].sum()) * plan.costs.row_bytes),
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
    shares = {name: sum(held) / max(len(held), 1) for name, held in parts.items()}
    name = max(shares, key=shares.__getitem__)
    if shares[name] < 0.02:
        return "computing: steps and prompts take the time, no limit is reached"
    return f"{name}: reached by a replica in {100 * shares[name]:.0f} % of the seconds"
