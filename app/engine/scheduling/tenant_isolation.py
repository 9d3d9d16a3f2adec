"""Tenant isolation: bounds on how much tenants with many streams delay the others.

A tenant is heavy if it runs more sequences, by weight, than the mean of all tenants. If no place is free, the youngest
sequence of the heaviest tenant is displaced by another tenant's first request.

With `engine.max_tenant_slowdown` a step also takes at most that many times as long as it would for the other tenants
alone: heavy tenants get a token limit, which their sequences share in time slices. A heavy tenant never gets fewer
tokens, by weight, than the heaviest of the others, so limited tenants are still served equally. A flood therefore slows
the steps of a tenant with n sequences down by at most max(slowdown, t(2n) / t(n)), where t(n) is the time of a step of
n sequences. Neither changes the bits of an answer.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from app.engine.scheduling.fair_queue import MAX_LEAD, FairQueue
from app.engine.sequence import Sequence

#: The time of a step of so many tokens is the median of this many.
_NUM_STEPS = 9
#: Step times are recorded up to this many tokens; larger steps say little about small ones.
_MAX_STEP_TOKENS = 256
#: The number of sequences whose last time slice is kept; beyond it all are forgotten.
_MAX_TIME_SLICES = 4096
#: A tenant counts as running for so many steps after its last sequence: its next request is probably on its way and
#: should not meet a large step.
_RECENT_STEPS = 8
#: In one step at most so many sequences are displaced.
_MAX_DISPLACED = 64
#: A heavy tenant that is behind by more than `_UNEVEN`, in the fair queue's prices, gets one more token per step for
#: each `_CATCH_UP` beyond it.
_UNEVEN, _CATCH_UP = 256.0, 128.0


class StepTimes:
    """The time of a step of n tokens: a line through the medians of the measured numbers of tokens."""

    def __init__(self) -> None:
        self._step_times: dict[int, deque[float]] = {}
        self._line: tuple[float, float] | None = None

    def observe(self, num_tokens: int, time_s: float) -> None:
        """Record the duration of a step of so many tokens, decoded or of prompts."""
        if 0 < num_tokens <= _MAX_STEP_TOKENS:
            self._step_times.setdefault(num_tokens, deque(maxlen=_NUM_STEPS)).append(time_s)
            self._line = None

    def max_step_tokens(self, num_tokens: int, slowdown: float) -> int:
        """The tokens of a step that takes `slowdown` times as long as one of `num_tokens`; at least as many."""
        start_s, token_s = self._fit()
        if token_s <= 0:
            return _MAX_STEP_TOKENS if self._step_times else num_tokens
        return max(num_tokens, int(slowdown * num_tokens + (slowdown - 1) * start_s / token_s + 1e-6))

    def _fit(self) -> tuple[float, float]:
        """(seconds per step, seconds per token), neither below 0; least squares, each number of tokens counted once.

        With one measured number all of a step's time is attributed to its tokens, so that rather too few are allowed
        than too many.
        """
        if self._line is None:
            counts = [float(num_tokens) for num_tokens in self._step_times]
            times_s = [statistics.median(times) for times in self._step_times.values()]
            if not counts:
                self._line = (0.0, 0.0)
            elif len(counts) == 1:
                self._line = (0.0, times_s[0] / counts[0])
            else:
                token_s, start_s = statistics.linear_regression(counts, times_s)
                self._line = (0.0, sum(times_s) / sum(counts)) if start_s < 0 else (start_s, max(token_s, 0.0))
        return self._line


class _RecentTenant(NamedTuple):
    """How many sequences a tenant ran, its weight, and the number of the step."""

    num_running: int
    weight: float
    step: int


class TenantIsolation:
    """The isolation of one engine. With a `slowdown` of 0 steps may take any time."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._times = StepTimes()
        self._last_slices: dict[str, int] = {}  # request id of a heavy tenant's sequence -> number of its last one
        self._num_slices = 0
        self._num_steps = 0
        self._recent: dict[str, _RecentTenant] = {}

    def observe(self, num_tokens: int, time_s: float) -> None:
        """`StepTimes.observe`."""
        if self._slowdown:
            self._times.observe(num_tokens, time_s)

    @property
    def is_on(self) -> bool:
        """Whether steps have a bound; sequences are displaced in any case."""
        return self._slowdown > 0

    def heavy_tenants(self, running: SequenceOf[Sequence], waiting: Iterable[Sequence]) -> list[str]:
        """Tenants that run more sequences, by weight, than the mean of all that run or wait.

        `waiting` has one sequence of each waiting tenant.
        """
        num_running, weights = _num_running(running)
        for sequence in waiting:
            if sequence.tenant_id not in num_running:
                num_running[sequence.tenant_id], weights[sequence.tenant_id] = 1, sequence.request.weight
        return _heavy(num_running, weights)

    def token_limits(
        self,
        running: SequenceOf[Sequence],
        waiting: Iterable[Sequence] = (),
        counter_of: Callable[[str], float] = lambda _: 0.0,
    ) -> dict[str, int]:
        """The heavy tenants and how many tokens each may compute in this step. Empty: no limits. Called once per step.

        `waiting` has one sequence of each waiting tenant: a tenant that does not run counts with its last number of
        sequences, or with 1. `counter_of`: the fair queue's counters; a heavy tenant that is behind gets more, so that
        it is served equally although the others' prompts are computed whole.
        """
        if not self._slowdown:
            return {}
        num_running, weights = _num_running(running)
        self._num_steps += 1
        self._add_waiting_and_recent(num_running, weights, waiting)
        if len(num_running) < 2:
            self._last_slices.clear()
            return {}
        heavy_tenants = _heavy(num_running, weights)
        others = [tenant_id for tenant_id in num_running if tenant_id not in heavy_tenants]
        if not heavy_tenants or not others:  # all are equal, apart from rounding
            return {}
        num_others = sum(num_running[tenant_id] for tenant_id in others)
        equal = max(num_running[tenant_id] / weights[tenant_id] for tenant_id in others)
        limit = self._times.max_step_tokens(num_others, self._slowdown) - num_others
        share = limit / sum(weights[tenant_id] for tenant_id in heavy_tenants)
        served = max(counter_of(tenant_id) for tenant_id in others)
        limits: dict[str, int] = {}
        for tenant_id in heavy_tenants:
            behind = max(0.0, served - counter_of(tenant_id) - _UNEVEN)
            limits[tenant_id] = max(1, round((max(share, equal) + behind / _CATCH_UP) * weights[tenant_id]))
        return limits

    def displace_for_waiting(
        self,
        running: list[Sequence],
        queue: FairQueue,
        heavy_tenants: Container[str],
        num_free: int,
        displace: Callable[[Sequence], None],
    ) -> list[Sequence]:
        """If no place is free, displace the youngest sequence of the heaviest tenant for the first request of each
        other tenant.

        `displace` removes a sequence from `running` and queues it again; most of its blocks stay in the prefix cache.
        Returns the sequences that got a place.
        """
        preferred: list[Sequence] = []
        least = queue.least_waiting()
        in_order = sorted(queue.first_of_each(), key=lambda sequence: queue.counter_of(sequence.tenant_id))
        for waiting_sequence in in_order[num_free : num_free + _MAX_DISPLACED]:
            victim = self.victim(running, waiting_sequence, heavy_tenants, queue.counter_of, least)
            if victim is None:
                continue
            displace(victim)
            preferred.append(waiting_sequence)
        return preferred

    def throttle_decoding(self, running: SequenceOf[Sequence], token_limit_of: dict[str, int]) -> set[str]:
        """Request ids of the heavy tenants' streams that are not computed in this step.

        `token_limit_of` is written in place: the rest of each limit is for prompts. While a tenant has prompts to
        compute, they keep half of it.
        """
        skipped: set[str] = set()
        for tenant_id, limit in token_limit_of.items():
            mine = [sequence for sequence in running if sequence.tenant_id == tenant_id]
            decoding = [each for each in mine if each.num_pending == 1]
            number = min(len(decoding), limit if len(decoding) == len(mine) else max(limit // 2, 1))
            chosen = self.next_time_slices(decoding, number)
            skipped |= {each.request_id for each in decoding} - {each.request_id for each in chosen}
            token_limit_of[tenant_id] = max(limit - number, int(number == 0))
        return skipped

    def _add_waiting_and_recent(
        self, num_running: Counter[str], weights: dict[str, float], waiting: Iterable[Sequence]
    ) -> None:
        """Add the tenants that wait or ran recently; `num_running` and `weights` are written in place."""
        recent, now = self._recent, self._num_steps
        for tenant_id, count in num_running.items():
            recent[tenant_id] = _RecentTenant(count, weights[tenant_id], now)
        for sequence in waiting:
            if sequence.tenant_id not in num_running:
                before = recent.get(sequence.tenant_id)
                count = 1 if before is None else before.num_running
                recent[sequence.tenant_id] = _RecentTenant(count, sequence.request.weight, now)
        for tenant_id, (count, weight, last) in list(recent.items()):
            if now - last > _RECENT_STEPS:
                del recent[tenant_id]
            elif tenant_id not in num_running:
                num_running[tenant_id], weights[tenant_id] = count, weight

    def next_time_slices(self, decoding: SequenceOf[Sequence], number: int) -> list[Sequence]:
        """The `number` sequences of a heavy tenant whose last time slice is longest ago."""
        last = {sequence.request_id: self._last_slices.get(sequence.request_id, 0) for sequence in decoding}
        chosen = sorted(decoding, key=lambda sequence: last[sequence.request_id])[:number]
        if len(self._last_slices) > _MAX_TIME_SLICES:
            self._last_slices.clear()
        self._last_slices |= last
        for sequence in chosen:
            self._num_slices += 1
            self._last_slices[sequence.request_id] = self._num_slices
        return chosen

    def victim(
        self,
        running: SequenceOf[Sequence],
        waiting_sequence: Sequence,
        heavy_tenants: Container[str],
        counter_of: Callable[[str], float] = lambda _: 0.0,
        least_waiting: float = math.inf,
    ) -> Sequence | None:
        """The running sequence that gives its place to `waiting_sequence`: the youngest of the heaviest tenant, if that
        tenant stays the heavier one.

        None if the waiting tenant is already `MAX_LEAD` ahead of the heaviest tenant or of the least served waiting
        tenant (`FairQueue.least_waiting`): then it waits for a place in fair order.
        """
        num_running, weights = _num_running(running)
        shares = {tenant_id: (count - 1) / weights[tenant_id] for tenant_id, count in num_running.items()}
        candidates = [tenant_id for tenant_id in shares if tenant_id in heavy_tenants]
        if waiting_sequence.tenant_id in heavy_tenants or not candidates:
            return None
        heaviest = max(candidates, key=shares.__getitem__)
        if counter_of(waiting_sequence.tenant_id) - min(counter_of(heaviest), least_waiting) > MAX_LEAD:
            return None
        if shares[heaviest] < (num_running[waiting_sequence.tenant_id] + 1) / waiting_sequence.request.weight:
            return None
        return next(sequence for sequence in reversed(running) if sequence.tenant_id == heaviest)


def _num_running(running: SequenceOf[Sequence]) -> tuple[Counter[str], dict[str, float]]:
    """How many sequences each tenant runs, and its weight."""
    return Counter(each.tenant_id for each in running), {each.tenant_id: each.request.weight for each in running}


def _heavy(num_running: Mapping[str, int], weights: Mapping[str, float]) -> list[str]:
    """The tenants that run more, by weight, than the mean."""
    mean = sum(num_running.values()) / sum(weights.values())
    return [tenant_id for tenant_id, count in num_running.items() if count > mean * weights[tenant_id]]
