"""Autoscaling policy for Ray Serve: how many engine replicas there should be, from their work and their adapters.

Input is what each replica records (`record_autoscaling_stats`) and the requests that wait at a deployment without
replicas. Output is a number for Serve's autoscaler, which applies its own bounds and delays, and the reason, in a log
line and a metric. Serve's own policy counts open calls; here one call per ingress stays open whatever it carries, so
that count means nothing.

Serve's controller is sent this module's source, so it must import nothing of this package. What the policy decides is
sent to the placement actor, where ingresses read it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import ray
from ray.serve.config import AutoscalingContext
from ray.util.metrics import Gauge

logger = logging.getLogger("ray.serve")

#: Key of the state that Serve keeps between decisions: [(time, desired replicas)], oldest first.
_HISTORY = "polylora_wanted"
#: Decisions that are kept, whatever the scale-down window: Serve asks several times a second.
_MAX_HISTORY = 4096
#: Decisions closer together than this share one entry of the history.
_HISTORY_STEP_S = 0.5
#: Bounds of what a replica may report, and of the answer.
_MAX_VALUE, _MAX_REPLICAS = 1e15, 1e6
#: Decisions that are kept, the newest, and how often they are sent again: a placement actor that restarts has none.
MAX_DECISIONS, RESEND_S = 100, 60.0
#: The placement actor of an application's first base model, and how long it may take to answer.
PLACEMENT_ACTOR, NAMESPACE, SEND_TIMEOUT_S = "placement-{}.v1", "polylora", 10.0

#: Time (Unix), number of replicas before, wanted number, the signal that needs the most and how many it needs.
Decision = tuple[float, int, int, str, float]


@dataclass(frozen=True)
class Demand:
    """One replica's work and capacity.

    work_tokens: prompt and answer tokens still to compute for running and waiting requests, as far as they can be
    predicted. tokens_per_s: throughput when the replica has enough to do; 0 if not measured yet. adapter_rows: rank
    rows of the adapters that were requested lately, on the device or not; num_rank_rows: rows that the replica has.
    kv_used: fraction of its KV blocks that running sequences hold, 0 to 1.
    """

    work_tokens: float
    tokens_per_s: float
    adapter_rows: float
    num_rank_rows: float
    kv_used: float


@dataclass(frozen=True)
class Objective:
    """What the number of replicas is to achieve; the keys of `policy_kwargs` in a Serve application file.

    target_drain_s: a replica should finish all its current work within this time. max_lora_utilization,
    max_kv_utilization: fraction of the rank rows and KV blocks that may be in demand. forecast_s: how far ahead rising
    demand is extrapolated; about the time that a replica takes to start. scale_down_window_s: demand older than this is
    ignored. scale_down_utilization: a replica is removed when the others would then be used no more than this.
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
                raise ValueError(f"{field.name} is {value!r}; it must be a number of at least 0")
        for name in ("target_drain_s", "max_lora_utilization", "max_kv_utilization", "scale_down_utilization"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0; it must be greater")
        if self.scale_down_utilization > 1:
            raise ValueError(f"scale_down_utilization is {self.scale_down_utilization}; it must be at most 1")


@dataclass(frozen=True)
class DesiredReplicas:
    """How many replicas would do, not rounded, and the signal that needs the most of them."""

    replicas: float
    reason: str


def desired_replicas(demands: Sequence[Demand], objective: Objective) -> DesiredReplicas:
    """How many replicas would carry this demand at full utilization.

    Each signal is the sum over replicas of the fraction of one replica that it takes; the largest decides. No work
    gives 0.
    """
    rate = max((demand.tokens_per_s for demand in demands), default=0.0)
    work = sum(demand.work_tokens for demand in demands)
    parts = {
        "pending tokens": work / (rate * objective.target_drain_s) if rate > 0 else float(work > 0),
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
    """Demand in `ahead_s` if it goes on rising as in the last `ahead_s`; at least the current demand, at most twice
    that.

    history: (time, desired replicas), oldest first, the last entry being now.
    """
    current = history[-1][1]
    lately = [(time_s, value) for time_s, value in history if now_s - time_s <= ahead_s]
    if ahead_s <= 0:
        return current
    slope = (current - lately[0][1]) / max(now_s - lately[0][0], ahead_s / 2)  # points close together are noise
    return min(max(current, current + slope * ahead_s), 2 * current)


def decide(history: Sequence[tuple[float, float]], num_replicas: int, now_s: float, objective: Objective) -> int:
    """How many replicas there should be. history: as in `forecast`; num_replicas: the current target.

    Scales up at once, to the forecast. Scales down only as far as the others could carry the highest demand of the
    window, which counts less the older it is: after a spike replicas are removed one by one.
    """
    up = math.ceil(forecast(history, now_s, objective.forecast_s) - 1e-9)
    if up > num_replicas:
        return up
    lately = max(
        value * max(0.0, 1.0 - (now_s - time_s) / objective.scale_down_window_s)
        if objective.scale_down_window_s > 0
        else history[-1][1]
        for time_s, value in history
    )
    down = math.ceil(max(lately, history[-1][1]) / objective.scale_down_utilization - 1e-9)
    return min(num_replicas, max(down, up))


class AdapterDemand:
    """The policy class that a Serve application file names; Serve's controller calls it.

    `policy_kwargs` are the fields of `Objective`. Raises TypeError or ValueError for others.
    """

    def __init__(self, **objective: float) -> None:
        self._objective = Objective(**objective)
        self._gauge = Gauge(
            "polylora_autoscaling_desired_replicas",
            description="Engine replicas that the autoscaler wants, by the signal that needs the most of them.",
            tag_keys=("application", "deployment", "reason"),
        )
        self._last_reason = ""
        self._last_change: tuple[int, int] | None = None
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._sender: threading.Thread | None = None
        self._is_sent, self._sent_s = True, 0.0

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state that Serve hands back with the next call."""
        count, state = self._decide(ctx)
        self._send(ctx)
        return count, state

    def _decide(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now_s = float(ctx.current_time or 0.0)
        if self._last_change == (0, 0) and ctx.target_num_replicas > 0:
            # Serve starts the first replica itself where requests wait, and calls no policy until it runs.
            self._record(ctx, now_s, (0, ctx.target_num_replicas), DesiredReplicas(1.0, "waiting requests"))
        if ctx.target_num_replicas == 0:
            # No replica can report; requests that wait for one call through Serve's handle.
            is_awaited = ctx.total_num_requests > 0
            reason = "waiting requests" if is_awaited else "nothing to do"
            self._publish(ctx, now_s, int(is_awaited), DesiredReplicas(float(is_awaited), reason))
            return int(is_awaited), {}
        demands = latest_demands(ctx.raw_metrics or {})
        history = [
            (at_s, value)
            for at_s, value in ctx.policy_state.get(_HISTORY, ())
            if 0
            <= now_s - at_s
            <= max(self._objective.scale_down_window_s, self._objective.forecast_s)  # the clock may be set back
        ][-_MAX_HISTORY:]
        if not demands:
            # No replica has reported yet: they are starting, and the requests they were started for have yet to reach
            # them. Count them as desired now, which `scale_down_window_s` remembers.
            return ctx.target_num_replicas, {_HISTORY: [*history, (now_s, float(ctx.target_num_replicas))][-2:]}
        desired = desired_replicas(demands, self._objective)
        count = decide([*history, (now_s, desired.replicas)], ctx.target_num_replicas, now_s, self._objective)
        if len(demands) < min(ctx.current_num_replicas, ctx.target_num_replicas):
            count = max(count, ctx.target_num_replicas)  # the work of replicas without a report is unknown
        if not history or now_s - history[-1][0] >= _HISTORY_STEP_S:
            history.append((now_s, desired.replicas))
        self._publish(ctx, now_s, count, desired)
        return count, {_HISTORY: history}

    def _publish(self, ctx: AutoscalingContext, now_s: float, count: int, desired: DesiredReplicas) -> None:
        """Export the wanted number; log and keep the decision if it is another than before, within Serve's bounds."""
        tags = {"application": ctx.app_name or "", "deployment": ctx.deployment_name}
        if self._last_reason not in ("", desired.reason):
            self._gauge.set(0, tags | {"reason": self._last_reason})
        self._last_reason = desired.reason
        self._gauge.set(count, tags | {"reason": desired.reason})
        before = ctx.target_num_replicas
        bounded = min(max(count, ctx.capacity_adjusted_min_replicas), ctx.capacity_adjusted_max_replicas)
        if bounded != before and (before, bounded) != self._last_change:
            self._record(ctx, now_s, (before, bounded), desired)
        self._last_change = (before, bounded)

    def _record(self, ctx: AutoscalingContext, now_s: float, change: tuple[int, int], desired: DesiredReplicas) -> None:
        logger.info(
            "%s: scaling %d -> %d replicas: %s need %.2f",
            ctx.deployment_name, *change, desired.reason, desired.replicas,
        )  # fmt: skip
        self._decisions.append((now_s, *change, desired.reason, desired.replicas))
        self._is_sent, self._last_change = False, change

    def _send(self, ctx: AutoscalingContext) -> None:
        """Send the decisions if there are new ones, and at intervals. A thread does it: it waits for Ray."""
        now_s = time.monotonic()
        is_due = not self._is_sent or now_s - self._sent_s >= RESEND_S
        if not self._decisions or not is_due or (self._sender is not None and self._sender.is_alive()):
            return
        self._is_sent, self._sent_s = True, now_s
        arguments = (ctx.app_name or "", ctx.deployment_name, [*self._decisions])
        self._sender = threading.Thread(target=send_decisions, args=arguments, daemon=True)
        self._sender.start()


def send_decisions(app_name: str, deployment: str, decisions: Sequence[Decision]) -> None:
    """Send a deployment's decisions to placement. A failure is logged; the next call sends them again.

    Blocks, for up to a minute if Ray's head node does not answer.
    """
    if not ray.is_initialized():  # outside of Serve's controller; Ray would start a cluster
        return
    try:
        placement = ray.get_actor(PLACEMENT_ACTOR.format(app_name), namespace=NAMESPACE)
        ray.get(placement.report_scaling.remote(deployment, decisions), timeout=SEND_TIMEOUT_S)
    except Exception as error:  # Ray has many errors for an actor that is down
        logger.warning("%s: autoscaling decisions did not reach placement: %s", deployment, error)


def latest_demands(series: Mapping[str, Mapping[Any, Sequence[Any]]]) -> list[Demand]:
    """The last report of each replica that has reported; the others are still starting.

    A value that is missing or is not a usable number counts as 0. series: name -> replica -> points with a value,
    oldest first, as Serve keeps what replicas record.
    """
    names = [field.name for field in fields(Demand)]
    replicas = {replica for name in names for replica, points in series.get(name, {}).items() if points}
    return [
        Demand(*(_number(series.get(name, {}).get(replica)) for name in names)) for replica in sorted(replicas, key=str)
    ]


def _number(points: Sequence[Any] | None) -> float:
    value = points[-1].value if points else 0.0
    return float(value) if isinstance(value, int | float) and 0 <= value <= _MAX_VALUE else 0.0
