"""How many engine replicas there should be, from what they and their adapters have to do.

In: what each replica says of itself (`record_autoscaling_stats`), and who waits at a deployment without replicas. Out:
a number for Ray Serve's autoscaler, which keeps its own bounds and delays, and the reason, as a log line and a metric.
Serve's own policy counts open calls; here one call per ingress stays open whatever it carries: that count says nothing.

Rule: Serve's controller is sent this module's source, so it imports nothing of this package. `desired_replicas` is arithmetic.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.util.metrics import Gauge

logger = logging.getLogger("ray.serve")

#: A key of the state that Serve keeps between decisions: [(time, replicas that were wanted)], the oldest first.
_HISTORY = "polylora_wanted"
#: Decisions that are remembered, whatever the hold: one is made several times a second.
_MAX_HISTORY = 4096
#: Decisions closer than this are one in the history.
_HISTORY_STEP_S = 0.5
#: No replica has a number above this to say, and more replicas than this are nobody's answer.
_MAX_VALUE, _MAX_REPLICAS = 1e15, 1e6


@dataclass(frozen=True)
class Demand:
    """One replica's work, and what it can do.

    work_tokens: prompt and answer tokens still to compute, of running and waiting requests, as far as can be foretold.
    tokens_per_s: what it computes when it has enough to do; 0 if it has not been seen to. adapter_rows: rank rows of
    the adapters that were asked for lately, on the device or not; num_rank_rows: rows it has. kv_used: part of its KV
    blocks that running sequences hold, 0 to 1.
    """

    work_tokens: float
    tokens_per_s: float
    adapter_rows: float
    num_rank_rows: float
    kv_used: float


@dataclass(frozen=True)
class Objective:
    """What the number of replicas is to achieve. Keys of `policy_kwargs` in a Serve application file.

    target_drain_s: a replica is to have done all work that it has now in so many seconds. max_lora_utilization, max_kv_utilization: how much of the
    rank rows and KV blocks may be in demand. forecast_s: how far ahead a rising demand is read: about what a replica
    takes to start. scale_down_window_s: what was wanted so long ago no longer counts. scale_down_utilization: a replica leaves when the others
    would be used to no more than this part.
    """

    target_drain_s: float = 2.0
    max_lora_utilization: float = 0.9
    max_kv_utilization: float = 0.85
    forecast_s: float = 10.0
    scale_down_window_s: float = 60.0
    scale_down_utilization: float = 0.8

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no decision can be made with."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} is {value!r}; it is a number, 0 or more")
        for name in ("target_drain_s", "max_lora_utilization", "max_kv_utilization", "scale_down_utilization"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0; it is more than that")
        if self.scale_down_utilization > 1:
            raise ValueError(f"scale_down_utilization is {self.scale_down_utilization}; it is at most 1")


@dataclass(frozen=True)
class DesiredReplicas:
    """How many replicas would do, not rounded, and what asks for the most of them."""

    replicas: float
    reason: str


def desired_replicas(demands: Sequence[Demand], objective: Objective) -> DesiredReplicas:
    """How many replicas would carry what these carry, each to its full.

    Each signal is a sum over replicas of the part of one that it takes; the largest decides. Nothing to do is 0.
    """
    rate = max((demand.tokens_per_s for demand in demands), default=0.0)
    work = sum(demand.work_tokens for demand in demands)
    parts = {
        "tokens to compute": work / (rate * objective.target_drain_s) if rate > 0 else float(work > 0),
        "rank rows in demand": sum(
            demand.adapter_rows / (demand.num_rank_rows * objective.max_lora_utilization)
            for demand in demands
            if demand.num_rank_rows > 0
        ),
        "KV blocks in use": sum(demand.kv_used for demand in demands) / objective.max_kv_utilization,
    }
    reason = max(parts, key=parts.__getitem__)
    return DesiredReplicas(min(parts[reason], _MAX_REPLICAS), reason if parts[reason] > 0 else "nothing to do")


def forecast(history: Sequence[tuple[float, float]], now_s: float, ahead_s: float) -> float:
    """What will be wanted in `ahead_s`, if it goes on rising as in the last `ahead_s`; never less than what is.

    history: (time, wanted), the oldest first, the last of them now. At most twice what is wanted now.
    """
    current = history[-1][1]
    lately = [(time_s, value) for time_s, value in history if now_s - time_s <= ahead_s]
    if ahead_s <= 0:
        return current
    slope = (current - lately[0][1]) / max(now_s - lately[0][0], ahead_s / 2)  # two points close by say little
    return min(max(current, current + slope * ahead_s), 2 * current)


def decide(history: Sequence[tuple[float, float]], num_replicas: int, now_s: float, objective: Objective) -> int:
    """How many replicas there should be. history: as in `forecast`; num_replicas: as many as there are to be now.

    Up at once, to what is foreseen. Down only as far as the others would have room for the most that was wanted lately,
    where what was wanted counts less the longer ago it was: a spike holds replicas, and lets them go one by one.
    """
    up = math.ceil(forecast(history, now_s, objective.forecast_s) - 1e-9)
    if up > num_replicas:
        return up
    held = max(
        value * max(0.0, 1.0 - (now_s - time_s) / objective.scale_down_window_s)
        if objective.scale_down_window_s > 0
        else history[-1][1]
        for time_s, value in history
    )
    down = math.ceil(max(held, history[-1][1]) / objective.scale_down_utilization - 1e-9)
    return min(num_replicas, max(down, up))


class AdapterDemand:
    """The policy class that an application file names: called by Serve's controller with what it knows.

    `policy_kwargs` are the fields of `Objective`. Raises TypeError or ValueError for others.
    """

    def __init__(self, **objective: float) -> None:
        self._objective = Objective(**objective)
        self._gauge = Gauge(
            "polylora_autoscaling_desired_replicas",
            description="Engine replicas that the autoscaler wants, by what asks for the most of them.",
            tag_keys=("application", "deployment", "reason"),
        )
        self._last: tuple[int, str] | None = None

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number, and the state that Serve hands back with the next call."""
        if ctx.target_num_replicas == 0:
            # Nobody is there to say what it has to do; whoever waits for a replica calls through Serve's handle.
            return (1 if ctx.total_num_requests > 0 else 0), {}
        now_s = float(ctx.current_time or 0.0)
        demands = latest_demands(ctx.raw_metrics or {})
        history = [
            (at_s, value)
            for at_s, value in ctx.policy_state.get(_HISTORY, ())
            if 0
            <= now_s - at_s
            <= max(self._objective.scale_down_window_s, self._objective.forecast_s)  # the clock may be set back
        ][-_MAX_HISTORY:]
        if not demands:
            # Nobody has said anything yet. Who was woken is still starting, and what it was woken for has yet to reach
            # it then: so it counts as wanted now, which `scale_down_window_s` remembers.
            return ctx.target_num_replicas, {_HISTORY: [*history, (now_s, float(ctx.target_num_replicas))][-2:]}
        want = desired_replicas(demands, self._objective)
        count = decide([*history, (now_s, want.replicas)], ctx.target_num_replicas, now_s, self._objective)
        if len(demands) < min(ctx.current_num_replicas, ctx.target_num_replicas):
            count = max(count, ctx.target_num_replicas)  # what the silent ones have to do is not known
        if not history or now_s - history[-1][0] >= _HISTORY_STEP_S:
            history.append((now_s, want.replicas))
        self._tell(ctx, count, want)
        return count, {_HISTORY: history}

    def _tell(self, ctx: AutoscalingContext, count: int, want: DesiredReplicas) -> None:
        tags = {"application": ctx.app_name or "", "deployment": ctx.deployment_name}
        if self._last is not None and self._last[1] != want.reason:
            self._gauge.set(0, tags | {"reason": self._last[1]})
        self._gauge.set(count, tags | {"reason": want.reason})
        if count != ctx.target_num_replicas and (count, want.reason) != self._last:
            logger.info(
                "%s: %d replicas are wanted, there are %d to be: %s ask for %.2f",
                ctx.deployment_name, count, ctx.target_num_replicas, want.reason, want.replicas,
            )  # fmt: skip
        self._last = (count, want.reason)


def latest_demands(series: Mapping[str, Mapping[Any, Sequence[Any]]]) -> list[Demand]:
    """The last word of each replica that has said anything; the others are still starting.

    What one has not said, or what is no number to count with, counts as 0: the rest of it counts. series: name ->
    replica -> points with a value, the oldest first, as Serve keeps what replicas record.
    """
    names = [field.name for field in fields(Demand)]
    replicas = {replica for name in names for replica, points in series.get(name, {}).items() if points}
    return [
        Demand(*(_number(series.get(name, {}).get(replica)) for name in names)) for replica in sorted(replicas, key=str)
    ]


def _number(points: Sequence[Any] | None) -> float:
    value = points[-1].value if points else 0.0
    return float(value) if isinstance(value, int | float) and 0 <= value <= _MAX_VALUE else 0.0
