"""Tenant isolation: bounds on how much tenants with many streams delay the others.

A tenant is wide if it runs more sequences, by weight, than the mean of all tenants. If no place is free, the youngest
sequence of the widest tenant gives its place to another tenant's first request.

With `engine.max_tenant_slowdown` a step also takes at most that many times as long as it would for the other tenants
alone: wide tenants get a token limit, and their sequences take turns. A wide tenant never gets fewer tokens, by weight,
than the widest of the others, so limited tenants are still served equally. A flood therefore slows the steps of a
tenant with n sequences down by at most max(slowdown, t(2n) / t(n)), where t(n) is the time of a step of n sequences.
Neither changes the bits of an answer.
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

#: The time of a step of one width is the median of so many.
_NUM_STEPS = 9
#: Step times are recorded up to this many tokens; larger steps say little about narrow ones.
_MAX_WIDTH = 256
#: The number of sequences whose last turn is kept; beyond it all are forgotten.
_MAX_TURNS = 4096
#: A tenant counts as running for so many steps after its last sequence: its next request is probably on its way and
#: should not meet a wide step.
_RECENT_STEPS = 8
#: In one step at most so many sequences give their places to others.
_MAX_DISPLACED = 64
#: A wide tenant that is behind by more than `_UNEVEN`, in the fair queue's prices, gets one more token per step for
#: each `_CATCH_UP` beyond it.
_UNEVEN, _CATCH_UP = 256.0, 128.0


class StepTimes:
    """The time of a step of n tokens: a line through the medians of the measured widths."""

    def __init__(self) -> None:
        self._step_times: dict[int, deque[float]] = {}
        self._line: tuple[float, float] | None = None

    def observe(self, num_tokens: int, time_s: float) -> None:
        """Record the duration of a step of so many tokens, decoded or of prompts."""
        if 0 < num_tokens <= _MAX_WIDTH:
            self._step_times.setdefault(num_tokens, deque(maxlen=_NUM_STEPS)).append(time_s)
            self._line = None

    def max_step_tokens(self, num_tokens: int, slowdown: float) -> int:
        """The tokens of a step that takes `slowdown` times as long as one of `num_tokens`; at least as many."""
        start_s, token_s = self._fit()
        if token_s <= 0:
            return _MAX_WIDTH if self._step_times else num_tokens
        return max(num_tokens, int(slowdown * num_tokens + (slowdown - 1) * start_s / token_s + 1e-6))

    def _fit(self) -> tuple[float, float]:
        """(seconds per step, seconds per token), neither below 0; least squares over widths, each counted once.

        With one measured width all of a step's time is attributed to its tokens, which errs to the narrow side.
        """
        if self._line is None:
            points = [(float(width), statistics.median(times)) for width, times in self._step_times.items()]
            widths, times_s = [width for width, _ in points], [time_s for _, time_s in points]
            if not points:
                self._line = (0.0, 0.0)
            elif len(points) == 1:
                self._line = (0.0, times_s[0] / widths[0])
            else:
                token_s, start_s = statistics.linear_regression(widths, times_s)
                self._line = (0.0, sum(times_s) / sum(widths)) if start_s < 0 else (start_s, max(token_s, 0.0))
        return self._line


class _RecentWidth(NamedTuple):
    """How many sequences a tenant ran, its weight, and the number of the step."""

    width: int
    weight: float
    step: int


class TenantIsolation:
    """The isolation of one engine. With a `slowdown` of 0 steps may take any time."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._times = StepTimes()
        self._turns: dict[str, int] = {}  # request id of a wide tenant's sequence -> number of its last turn
        self._num_turns = 0
        self._num_steps = 0
        self._recent: dict[str, _RecentWidth] = {}

    def observe(self, num_tokens: int, time_s: float) -> None:
        """`StepTimes.observe`."""
        if self._slowdown:
            self._times.observe(num_tokens, time_s)

    @property
    def is_on(self) -> bool:
        """Whether steps have a bound; places are made in any case."""
        return self._slowdown > 0

    def wide_tenants(self, running: SequenceOf[Sequence], waiting: Iterable[Sequence]) -> list[str]:
        """Tenants that run more sequences, by weight, than the mean of all that run or wait.

        `waiting` has one sequence of each waiting tenant.
        """
        widths, weights = _widths(running)
        for sequence in waiting:
            if sequence.tenant_id not in widths:
                widths[sequence.tenant_id], weights[sequence.tenant_id] = 1, sequence.request.weight
        return _wide(widths, weights)

    def token_limits(
        self,
        running: SequenceOf[Sequence],
        waiting: Iterable[Sequence] = (),
        counter_of: Callable[[str], float] = lambda _: 0.0,
    ) -> dict[str, int]:
        """The wide tenants and how many tokens each may compute in this step. Empty: no limits. Called once per step.

        `waiting` has one sequence of each waiting tenant: a tenant that does not run counts with its last width, or
        with 1. `counter_of`: the fair queue's counters; a wide tenant that is behind gets more, so that it is served
        equally although the others' prompts are computed whole.
        """
        if not self._slowdown:
            return {}
        widths, weights = _widths(running)
        self._num_steps += 1
        self._add_waiting_and_recent(widths, weights, waiting)
        if len(widths) < 2:
            self._turns.clear()
            return {}
        wide_tenants = _wide(widths, weights)
        others = [tenant_id for tenant_id in widths if tenant_id not in wide_tenants]
        if not wide_tenants or not others:  # all are equal, apart from rounding
            return {}
        num_others = sum(widths[tenant_id] for tenant_id in others)
        equal = max(widths[tenant_id] / weights[tenant_id] for tenant_id in others)
        limit = self._times.max_step_tokens(num_others, self._slowdown) - num_others
        share = limit / sum(weights[tenant_id] for tenant_id in wide_tenants)
        served = max(counter_of(tenant_id) for tenant_id in others)
        limits: dict[str, int] = {}
        for tenant_id in wide_tenants:
            behind = max(0.0, served - counter_of(tenant_id) - _UNEVEN)
            limits[tenant_id] = max(1, round((max(share, equal) + behind / _CATCH_UP) * weights[tenant_id]))
        return limits

    def make_places(
        self,
        running: list[Sequence],
        queue: FairQueue,
        wide_tenants: Container[str],
        num_free: int,
        displace: Callable[[Sequence], None],
    ) -> list[Sequence]:
        """If no place is free, displace the youngest sequence of the widest tenant for the first request of each other
        tenant.

        `displace` removes a sequence from `running` and queues it again; most of its blocks stay in the prefix cache.
        Returns the sequences that got a place.
        """
        preferred: list[Sequence] = []
        least = queue.least_waiting()
        in_order = sorted(queue.first_of_each(), key=lambda sequence: queue.counter_of(sequence.tenant_id))
        for waiting_sequence in in_order[num_free : num_free + _MAX_DISPLACED]:
            victim = self.victim(running, waiting_sequence, wide_tenants, queue.counter_of, least)
            if victim is None:
                continue
            displace(victim)
            preferred.append(waiting_sequence)
        return preferred

    def take_turns(self, running: SequenceOf[Sequence], token_limit_of: dict[str, int]) -> set[str]:
        """Request ids of the wide tenants' streams that are not computed in this step.

        `token_limit_of` is written in place: the rest of each limit is for prompts. While a tenant has prompts to
        compute, they keep half of it.
        """
        skipped: set[str] = set()
        for tenant_id, limit in token_limit_of.items():
            mine = [sequence for sequence in running if sequence.tenant_id == tenant_id]
            decoding = [each for each in mine if each.num_tokens - each.num_computed == 1]
            number = min(len(decoding), limit if len(decoding) == len(mine) else max(limit // 2, 1))
            chosen = self.next_turn(decoding, number)
            skipped |= {each.request_id for each in decoding} - {each.request_id for each in chosen}
            token_limit_of[tenant_id] = max(limit - number, int(number == 0))
        return skipped

    def _add_waiting_and_recent(
        self, widths: Counter[str], weights: dict[str, float], waiting: Iterable[Sequence]
    ) -> None:
        """Add the tenants that wait or ran recently; `widths` and `weights` are written in place."""
        recent, now = self._recent, self._num_steps
        for tenant_id, width in widths.items():
            recent[tenant_id] = _RecentWidth(width, weights[tenant_id], now)
        for sequence in waiting:
            if sequence.tenant_id not in widths:
                before = recent.get(sequence.tenant_id)
                width = 1 if before is None else before.width
                recent[sequence.tenant_id] = _RecentWidth(width, sequence.request.weight, now)
        for tenant_id, (width, weight, last) in list(recent.items()):
            if now - last > _RECENT_STEPS:
                del recent[tenant_id]
            elif tenant_id not in widths:
                widths[tenant_id], weights[tenant_id] = width, weight

    def next_turn(self, waiting: SequenceOf[Sequence], number: int) -> list[Sequence]:
        """The `number` sequences of a wide tenant whose last turn is longest ago."""
        last = {sequence.request_id: self._turns.get(sequence.request_id, 0) for sequence in waiting}
        chosen = sorted(waiting, key=lambda sequence: last[sequence.request_id])[:number]
        if len(self._turns) > _MAX_TURNS:
            self._turns.clear()
        self._turns |= last
        for sequence in chosen:
            self._num_turns += 1
            self._turns[sequence.request_id] = self._num_turns
        return chosen

    def victim(
        self,
        running: SequenceOf[Sequence],
        waiting_sequence: Sequence,
        wide_tenants: Container[str],
        counter_of: Callable[[str], float] = lambda _: 0.0,
        least_waiting: float = math.inf,
    ) -> Sequence | None:
        """The running sequence that gives its place to `waiting_sequence`: the youngest of the widest tenant, if that
        tenant stays the wider one.

        None if the waiting tenant is already `MAX_LEAD` ahead of the widest tenant or of the least served waiting
        tenant (`FairQueue.least_waiting`): then it waits for a place in fair order.
        """
        widths, weights = _widths(running)
        shares = {tenant_id: (width - 1) / weights[tenant_id] for tenant_id, width in widths.items()}
        candidates = [tenant_id for tenant_id in shares if tenant_id in wide_tenants]
        if waiting_sequence.tenant_id in wide_tenants or not candidates:
            return None
        widest = max(candidates, key=shares.__getitem__)
        if counter_of(waiting_sequence.tenant_id) - min(counter_of(widest), least_waiting) > MAX_LEAD:
            return None
        if shares[widest] < (widths[waiting_sequence.tenant_id] + 1) / waiting_sequence.request.weight:
            return None
        return next(sequence for sequence in reversed(running) if sequence.tenant_id == widest)


def _widths(running: SequenceOf[Sequence]) -> tuple[Counter[str], dict[str, float]]:
    """How many sequences each tenant runs, and its weight."""
    return Counter(each.tenant_id for each in running), {each.tenant_id: each.request.weight for each in running}


def _wide(widths: Mapping[str, int], weights: Mapping[str, float]) -> list[str]:
    """The tenants that run more, by weight, than the mean."""
    mean = sum(widths.values()) / sum(weights.values())
    return [tenant_id for tenant_id, width in widths.items() if width > mean * weights[tenant_id]]
