"""The results of a simulated run: numbers by name, and their means over seeds with confidence intervals.

Names and definitions follow Dynamo's simulator where it has them: hits, loads and unloads, route churn, imbalance,
ticks above capacity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.simulation.replica import SimulatedRequest
from app.simulation.traffic import BASE, Traffic

CLASSES = ("hot", "warm", "tail")
#: Student's t for a two-sided 95 % interval, by degrees of freedom; beyond the table its limit.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 7: 2.36, 9: 2.26, 14: 2.14, 19: 2.09, 29: 2.05}


class Tick(NamedTuple):
    """At one time: number of replicas, the largest load over the mean, and replicas with more adapters than capacity.

    The last three are maxima over replicas: rank rows that its requests need, running requests, used fraction of KV
    memory.
    """

    now_s: float
    num_replicas: int
    imbalance: float
    num_over: int
    num_rows: int
    num_running: int
    kv_used: float


class Result:
    """Filled while the simulation runs."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.first_token_s: NDArray[np.float64] = np.full(traffic.num_requests, math.nan)
        self.total_s: NDArray[np.float64] = np.full(traffic.num_requests, math.nan)
        self.ticks: list[Tick] = []
        self.num_hits = self.num_loads = self.num_unloads = 0
        self.num_host_hits = self.num_disk_reads = 0
        self.num_cached_tokens = 0
        self.num_route_changes = self.num_moved = self.num_pinned_loads = 0
        self.scalings: list[tuple[float, int, int]] = []  # (time, target before, target after)
        self.end_s = 0.0

    def add(self, job: SimulatedRequest) -> None:
        """Add a request that ended."""
        self.first_token_s[job.index] = job.first_s - job.arrival_s
        self.total_s[job.index] = job.done_s - job.arrival_s
        self.num_cached_tokens += job.num_cached

    @property
    def num_lost(self) -> int:
        """Requests that never ended; there must be none."""
        return int(np.isnan(self.total_s).sum())

    def reaction_s(self, change_s: float) -> float:
        """Seconds from a change of the traffic to the next scale-up decision; infinity if there was none."""
        ups_s = [at_s for at_s, before, now in self.scalings if at_s >= change_s and now > before]
        return min(ups_s, default=math.inf) - change_s

    def summary(self) -> dict[str, float]:
        """The numbers of one run, by name."""
        num_with = max(self.num_hits + self.num_loads, 1)
        tokens = float((self.traffic.prompt_tokens + self.traffic.output_tokens).sum())
        values = {
            "hit_rate": self.num_hits / num_with,
            "loads_per_1000": 1000 * self.num_loads / num_with,
            "unloads_per_1000": 1000 * self.num_unloads / num_with,
            "disk_reads_per_1000": 1000 * self.num_disk_reads / num_with,
            "cached_share": self.num_cached_tokens / max(int(self.traffic.prompt_tokens.sum()), 1),
            "route_changes": float(self.num_route_changes),
            "imbalance": float(np.mean([tick.imbalance for tick in self.ticks])) if self.ticks else 1.0,
            "ticks_over": float(sum(tick.num_over > 0 for tick in self.ticks)),
            "tokens_per_s": tokens / self.end_s if self.end_s else 0.0,
            "ttft_p50_s": percentile(self.first_token_s, 50),
            "ttft_p99_s": percentile(self.first_token_s, 99),
            "jain": self._jain(),
            "scalings": float(len(self.scalings)),
            "pinned_loads": float(self.num_pinned_loads),
            "replicas_mean": float(np.mean([tick.num_replicas for tick in self.ticks])) if self.ticks else 0.0,
            "replicas_max": float(max((tick.num_replicas for tick in self.ticks), default=0)),
            "lost": float(self.num_lost),
        }
        classes = np.array([*self.traffic.classes(), "base"])[self.traffic.adapter]  # BASE is the last
        assert BASE == -1
        for name in CLASSES:
            values[f"ttft_p99_{name}_s"] = percentile(self.first_token_s[classes == name], 99)
        return values

    def _jain(self) -> float:
        """Jain's index over the tenants' answer speed (tokens over time); 1 is equal."""
        speed = self.traffic.output_tokens / np.maximum(self.total_s, 1e-9)
        per_tenant = np.array([speed[self.traffic.tenant == each].mean() for each in np.unique(self.traffic.tenant)])
        return float(per_tenant.sum() ** 2 / (len(per_tenant) * (per_tenant**2).sum()))


class Interval(NamedTuple):
    """The mean of several runs, and its 95 % confidence interval. NaN: some run lacks the number."""

    mean: float
    plus_minus: float

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "–"
        digits = 0 if abs(self.mean) >= 100 else 1 if abs(self.mean) >= 10 else 3
        return f"{self.mean:.{digits}f} ± {self.plus_minus:.{digits}f}"


def intervals(summaries: Sequence[Mapping[str, float]]) -> dict[str, Interval]:
    """Each number over several seeds."""
    count = len(summaries)
    t = next((value for n, value in sorted(_T.items(), reverse=True) if n <= count - 1), math.inf)
    found = {}
    for name in summaries[0]:
        values = np.array([summary[name] for summary in summaries])
        if not np.isfinite(values).all():
            found[name] = Interval(math.nan, math.nan)
            continue
        spread = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
        found[name] = Interval(float(values.mean()), t * spread if spread else 0.0)
    return found


def percentile(values: NDArray[np.float64], which: float) -> float:
    """NaN for no values."""
    return float(np.percentile(values, which)) if len(values) else math.nan
