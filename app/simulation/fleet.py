"""A fleet on a virtual clock: placement, replica choice, loads, and replicas that start, drain and die.

Decisions are production's own code: `PlacementState` with its policy, the ingress's `ReplicaLoadTracker` and
`choose_replica`, the store's `BytesBoundedCache` for host memory, and the autoscaler (`scaling`). Events happen in
order of time and all randomness comes from the seed, so a run is the same on any machine. Simplifications: one ingress
that sees placement's table at once, and one node's host memory for all replicas.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.config import PlacementConfig
from app.deployments.ingress.dispatch.replica_load import ReplicaLoadTracker
from app.deployments.placement.delta_reporter import DeltaReporter
from app.deployments.placement.messages import ReplicaIdentity, ReplicaReport, Row
from app.deployments.placement.replica_choice import choose_replica, make_policy
from app.deployments.placement.service import REBALANCE_INTERVAL_S
from app.deployments.placement.state import PlacementState
from app.deployments.store.bytes_bounded_cache import BytesBoundedCache
from app.engine.sequence import Status
from app.simulation.costs import Costs
from app.simulation.replica import Replica, ReplicaSize, SimulatedRequest
from app.simulation.result import Result, Tick
from app.simulation.scaling import SCALING_INTERVAL_S, Scaler, Scaling
from app.simulation.traffic import BASE, Traffic


@dataclass(frozen=True, slots=True)
class Plan:
    """The simulated fleet. `lost_s`: at each of these times the replica with the most work dies."""

    num_replicas: int
    costs: Costs
    size: ReplicaSize = field(default_factory=ReplicaSize)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    host_bytes: int = 8 << 30
    scaling: Scaling | None = None
    lost_s: Sequence[float] = ()
    is_warm: bool = True  # every adapter is on disk already
    pinned: Sequence[int] = ()  # adapters that every replica loads before it takes requests


def simulate(traffic: Traffic, plan: Plan, seed: int) -> Result:
    """Run all requests to their end."""
    return _Fleet(traffic, plan, seed).run()


class _Fleet:
    """The state of one run."""

    def __init__(self, traffic: Traffic, plan: Plan, seed: int) -> None:
        self._traffic, self._plan = traffic, plan
        self._now_s = 0.0
        self._draw = random.Random(seed)
        self._policy = make_policy(plan.placement)
        placement = plan.placement
        self._placement = PlacementState(
            self._policy, placement.heartbeat_timeout_s, placement.report_interval_s, placement.min_replicas_per_adapter
        )
        self._loads = ReplicaLoadTracker(lambda: self._now_s)
        self._host = BytesBoundedCache(plan.host_bytes, "lru")
        self._on_disk: set[str] = set(traffic.digests()) if plan.is_warm else set()
        self._ready_s: dict[str, float] = {}  # adapters being loaded, and when they are ready
        self._digests = traffic.digests()
        self._replicas: dict[str, Replica] = {}
        self._leaving: list[Replica] = []
        self._reporters: dict[str, DeltaReporter] = {}
        self._usable_ids: list[str] = []
        self._assigned_before: dict[str, Row] = {}
        self._events: list[tuple[float, int, str, object]] = []
        self._num_events = self._num_started = self._num_jobs_open = 0
        self._scaler = None if plan.scaling is None else Scaler(plan.scaling)
        self._pinned = {self._digests[index]: int(traffic.rank[index]) for index in plan.pinned}
        self._to_start = 0
        self._stranded: list[SimulatedRequest] = []
        self.result = Result(traffic)

    def run(self) -> Result:
        for _ in range(self._plan.num_replicas):
            self._start_replica()
        self._schedule(0.0, "tick", None)
        if self._plan.scaling is not None:
            self._schedule(SCALING_INTERVAL_S, "scale", None)
        for lost_s in self._plan.lost_s:
            self._schedule(lost_s, "lose", None)
        traffic = self._traffic
        times, adapters, ranks = traffic.arrival_s.tolist(), traffic.adapter.tolist(), traffic.rank.tolist()
        prompts, outputs = traffic.prompt_tokens.tolist(), traffic.output_tokens.tolist()
        tenants = traffic.tenant.tolist()
        prefixes = traffic.prefixes()
        events = self._events
        for index, arrival_s in enumerate(times):
            while events and events[0][0] <= arrival_s:
                self._handle_next_event()
            self._now_s = arrival_s
            adapter = adapters[index]
            is_base = adapter == BASE
            self._num_jobs_open += 1
            job = SimulatedRequest(
                index, arrival_s, adapter,
                None if is_base else self._digests[adapter], 0 if is_base else ranks[adapter],
                prompts[index], outputs[index], f"t{tenants[index]}", traffic.weights.get(tenants[index], 1.0),
                *prefixes[index],
            )  # fmt: skip
            self._dispatch(job)
        while self._num_jobs_open:
            self._handle_next_event()
        self.result.end_s = self._now_s
        for replica in [*self._replicas.values(), *self._leaving]:
            self._count(replica)
        return self.result

    def _handle_next_event(self) -> None:
        time_s, _, kind, what = heapq.heappop(self._events)
        self._now_s = max(self._now_s, time_s)
        if kind == "replica":
            assert isinstance(what, tuple)
            replica, version = what
            if replica.version == version:
                self._on_end(replica.run(time_s))
                self._schedule_replica(replica)
        elif kind == "enter":
            assert isinstance(what, tuple)
            job, num_tries = what
            if job.replica is not None and job.num_tries == num_tries:
                self._enter(job)
        elif kind == "report":
            assert isinstance(what, Replica)
            self._report_again(what)
        elif kind == "tick":
            self._tick()
        elif kind == "scale":
            self._scale()
        elif kind == "start":
            self._to_start -= 1
            self._start_replica()
        else:
            self._kill_busiest()

    def _dispatch(self, job: SimulatedRequest) -> None:
        if not self._usable_ids:
            self._stranded.append(job)
            return
        digest, view = job.digest, self._placement.view
        if digest is not None:
            if self._scaler is not None:
                self._scaler.note_request(digest, self._now_s)
            if self._policy.has_affinity and not view.assigned_replicas(digest):
                self._placement.assign([digest])
        chosen = choose_replica(
            digest, view, self._policy, self._replicas, self._usable_ids, self._loads.num_requests, self._draw,
            lambda: None if job.prefix is None else job.prefix.hex(),
        )  # fmt: skip
        replica = job.replica = self._replicas[chosen]
        replica.jobs[job.index] = job
        self._loads.add(chosen, +1)
        job.num_tries += 1
        wait_s = 0.0 if digest is None or replica.pool.is_resident(digest) else self._fetch_s(digest, job.rank)
        if wait_s:
            self._schedule(self._now_s + wait_s, "enter", (job, job.num_tries))
        else:
            self._enter(job)

    def _enter(self, job: SimulatedRequest) -> None:
        assert job.replica is not None
        self._on_end(job.replica.enter(job, self._now_s))
        self._schedule_replica(job.replica)

    def _fetch_s(self, digest: str, rank: int) -> float:
        """How long until the adapter is at the engine; requests during a load wait for the same copy."""
        costs = self._plan.costs
        if digest in self._ready_s and self._ready_s[digest] > self._now_s:
            return self._ready_s[digest] - self._now_s
        if digest in self._host:
            self._host.record_hit(digest)
            self.result.num_host_hits += 1
            return costs.host_s
        read_s = costs.disk_s + (0.0 if digest in self._on_disk else costs.source_s)
        self.result.num_disk_reads += 1
        self._on_disk.add(digest)
        self._host.add(digest, round(rank * costs.row_bytes), read_s)
        self._ready_s[digest] = self._now_s + read_s + costs.host_s
        return read_s + costs.host_s

    def _on_end(self, jobs: Sequence[SimulatedRequest]) -> None:
        for job in jobs:
            assert job.replica is not None
            self._loads.add(job.replica.replica_id, -1)
            self._num_jobs_open -= 1
            self.result.add(job)

    def _schedule_replica(self, replica: Replica) -> None:
        next_s = replica.next_s()
        if next_s < math.inf:
            self._schedule(next_s, "replica", (replica, replica.version))

    def _schedule(self, time_s: float, kind: str, what: object) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, kind, what))

    def _start_replica(self) -> None:
        replica_id = f"r{self._num_started:04d}"
        self._num_started += 1
        replica = Replica(replica_id, self._now_s, self._plan.costs, self._plan.size)
        replica.pin(self._pinned)
        self._replicas[replica_id] = replica
        self._reporters[replica_id] = DeltaReporter(ReplicaIdentity("store", "{}", self._now_s))
        self._report(replica)
        self._schedule(self._now_s + self._draw.random() * self._plan.placement.report_interval_s, "report", replica)
        self._usable_ids = [*self._replicas]
        stranded, self._stranded = self._stranded, []
        for job in stranded:
            self._dispatch(job)

    def _remove(self, replica: Replica) -> None:
        self._report(replica, is_draining=True)
        del self._replicas[replica.replica_id]
        self._usable_ids = [*self._replicas]

    def _kill_busiest(self) -> None:
        """The replica with the most work dies; its requests move, continuing after the tokens that were sent."""
        if not self._replicas:
            return
        replica = max(self._replicas.values(), key=lambda each: (len(each.jobs), each.replica_id))
        self._on_end(replica.run(self._now_s))
        replica.version += 1
        self._remove(replica)
        self._count(replica)
        self._to_start += 1
        self._schedule(self._now_s + self._plan.costs.start_s, "start", None)
        for job in [*replica.jobs.values()]:
            self._loads.add(replica.replica_id, -1)
            job.num_pending, job.num_cached, job.bypassed, job.status = job.num_prompt, 0, 0, Status.WAITING
            job.num_charged = 0
            self.result.num_moved += 1
            self._dispatch(job)

    def _count(self, replica: Replica) -> None:
        self.result.num_hits += replica.num_hits
        self.result.num_loads += replica.num_loads
        self.result.num_pinned_loads += replica.num_pinned_loads
        self.result.num_unloads += replica.pool.num_evictions

    def _report_again(self, replica: Replica) -> None:
        """Periodic report at the replica's own times: placement's data is half an interval old on average."""
        if replica.replica_id not in self._replicas:
            return
        self._report(replica)
        self._loads.apply_reports({replica.replica_id: (len(replica.jobs), self._now_s)}, self._now_s)
        if self._is_going_on:
            self._schedule(self._now_s + self._plan.placement.report_interval_s, "report", replica)

    def _report(self, replica: Replica, *, is_draining: bool = False) -> None:
        if replica.reported_version == replica.version and not replica.jobs and not is_draining:
            return  # nothing has changed
        replica.reported_version = replica.version
        residents = replica.residents()
        state = ReplicaReport(
            replica.replica_id, replica.num_running, replica.num_waiting,
            tuple(residents),
            Counter(job.digest for job in replica.jobs.values() if job.digest is not None),
            num_rows=residents, num_rank_rows=replica.size.lora_pool_rows,
            cached_prefixes=replica.cached_prefixes if self._plan.placement.prefix_affinity else (),
        )  # fmt: skip
        assert self._placement.report(
            self._reporters[replica.replica_id].next_delta(state, is_draining=is_draining), self._now_s
        )

    def _tick(self) -> None:
        """Let placement rebalance, and record the state."""
        self._placement.rebalance(self._now_s)
        self._note_changes()
        for replica in [each for each in self._leaving if not each.jobs]:
            self._leaving.remove(replica)
            self._count(replica)
        self.result.ticks.append(self._state())
        if self._is_going_on:
            self._schedule(self._now_s + REBALANCE_INTERVAL_S, "tick", None)

    @property
    def _is_going_on(self) -> bool:
        return bool(self._num_jobs_open or self._now_s <= self._traffic.arrival_s[-1])

    def _note_changes(self) -> None:
        """Count changed routes: replicas added to or removed from an adapter that had some."""
        for key, row in self._placement.take_changes().items():
            if key[0] == "assigned":
                before, now = self._assigned_before.get(key[1], ()), row or ()
                if before:
                    self.result.num_route_changes += len(set(before) ^ set(now))
                self._assigned_before[key[1]] = now

    def _state(self) -> Tick:
        loads = [len(replica.jobs) for replica in self._replicas.values()]
        mean = sum(loads) / max(len(loads), 1)
        full = num_rows = num_running = 0
        kv_used = 0.0
        for replica in self._replicas.values():
            if not replica.jobs:
                continue
            lately = {job.digest: job.rank for job in replica.jobs.values() if job.digest is not None}
            slots = replica.size.max_loras - 1
            num_rows = max(num_rows, sum(lately.values()))
            num_running, kv_used = max(num_running, replica.num_running), max(kv_used, replica.kv_used)
            full += len(lately) > slots or sum(lately.values()) > replica.size.lora_pool_rows
        imbalance = max(loads, default=0) / mean if mean else 1.0
        return Tick(self._now_s, len(self._replicas), imbalance, full, num_rows, num_running, kv_used)

    def _scale(self) -> None:
        scaling, now_s = self._plan.scaling, self._now_s
        assert scaling is not None
        assert self._scaler is not None
        target = len(self._replicas) + self._to_start
        count = self._scaler.count(now_s, target, self._replicas.values(), self._placement.view)
        if count != target:
            self.result.scalings.append((now_s, target, count))
        for _ in range(count - target):
            self._to_start += 1
            self._schedule(now_s + self._plan.costs.start_s, "start", None)
        newest_first = sorted(self._replicas.values(), key=lambda each: (-each.started_s, each.replica_id))
        for replica in newest_first[: max(0, target - count)]:
            if len(self._replicas) > scaling.min_replicas:  # Serve stops the newest
                self._remove(replica)
                self._leaving.append(replica)
        self._schedule(now_s + SCALING_INTERVAL_S, "scale", None)
