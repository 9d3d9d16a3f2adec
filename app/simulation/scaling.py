"""The number of replicas of a simulated fleet, by the service's policy or by Ray Serve's, for comparison.

The service's policy is production's `desired_replicas` and `decide`. Serve's is reimplemented, because its own reads
the machine's clock; a test compares the two. Both are delayed as Serve delays them: a change is made once it was
desired at every look for its delay.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from app.deployments.placement.autoscaling import Demand, Objective, decide, desired_replicas
from app.deployments.placement.view import PlacementView
from app.deployments.replica.autoscaling_metrics import DEMAND_S, RATE_DECAY
from app.simulation.replica import Replica

#: Interval of scaling decisions.
SCALING_INTERVAL_S = 1.0
#: Serve's tolerance for rounding in time differences.
_DELAY_EPS_S = 1e-6


@dataclass(frozen=True, slots=True)
class QueueLength:
    """Ray Serve's own policy: requests at replicas, averaged over `look_back_s`, over `target_ongoing_requests`.

    Here each request counts as one call. In the service it would see one call per ingress and replica.
    """

    target_ongoing_requests: float = 2.0
    look_back_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Bounds of the number of replicas; `objective` and delays as in a Serve application file."""

    min_replicas: int
    max_replicas: int
    objective: Objective | QueueLength = field(default_factory=Objective)
    upscale_delay_s: float = 0.0
    downscale_delay_s: float = 0.0


class Delay:
    """Serve's upscale and downscale delays."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._direction, self._since_s = 0, 0.0

    def apply(self, desired: int, target: int, now_s: float) -> int:
        """`desired` once it was above or below `target` for the delay; `target` until then."""
        direction = (desired > target) - (desired < target)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        delay_s = self._scaling.upscale_delay_s if direction > 0 else self._scaling.downscale_delay_s
        if not direction or now_s - self._since_s + _DELAY_EPS_S < delay_s:
            return target
        self._direction = 0
        return desired


class Scaler:
    """The autoscaler of one fleet. Times are the virtual clock's and never go back."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._delay = Delay(scaling)
        self._history: list[tuple[float, float]] = []  # (time, desired replicas, or requests at replicas)
        self._requested_s: dict[str, float] = {}  # last request per adapter
        self._rates: dict[str, tuple[float, int, float]] = {}  # (time, tokens until then, best rate)

    def note_request(self, digest: str, now_s: float) -> None:
        """Note a request for an adapter."""
        self._requested_s[digest] = now_s

    def count(self, now_s: float, target: int, replicas: Collection[Replica], view: PlacementView) -> int:
        """The desired number of replicas. target: the current target."""
        scaling, objective = self._scaling, self._scaling.objective
        if isinstance(objective, QueueLength):
            self._note(now_s, float(sum(len(replica.jobs) for replica in replicas)), objective.look_back_s)
            mean = sum(value for _, value in self._history) / len(self._history)
            desired = math.ceil(mean / objective.target_ongoing_requests) if replicas else target
        else:
            self._requested_s = {digest: at_s for digest, at_s in self._requested_s.items() if now_s - at_s <= DEMAND_S}
            want = desired_replicas([self._demand(replica, now_s, view) for replica in replicas], objective)
            self._note(now_s, want.replicas, max(objective.scale_down_window_s, objective.forecast_s))
            desired = decide(self._history, target, now_s, objective)
        count = self._delay.apply(max(1, desired), target, now_s)
        return min(max(count, scaling.min_replicas), scaling.max_replicas)

    def _note(self, now_s: float, value: float, longest_s: float) -> None:
        self._history = [entry for entry in self._history if now_s - entry[0] <= longest_s]
        self._history.append((now_s, value))

    def _demand(self, replica: Replica, now_s: float, view: PlacementView) -> Demand:
        """What the replica reports to the autoscaler (`replica.autoscaling_metrics` computes it from the engine's
        counts).
        """
        then_s, tokens, rate = self._rates.get(replica.replica_id, (replica.started_s, 0, 0.0))
        if now_s > then_s and replica.num_running:
            rate = max(rate * RATE_DECAY, (replica.num_tokens - tokens) / (now_s - then_s))
        self._rates[replica.replica_id] = (now_s, replica.num_tokens, rate)
        work = sum(
            job.num_prompt + job.output_tokens if math.isnan(job.first_s) else job.output_tokens / 2
            for job in replica.jobs.values()
        )
        here = [digest for digest in view.assigned_adapters(replica.replica_id) if digest in self._requested_s]
        rows = sum(
            (view.num_rows(digest) or view.mean_rows) / max(len(view.assigned_replicas(digest)), 1) for digest in here
        )
        return Demand(work, rate, rows, replica.size.lora_pool_rows, replica.kv_used)
