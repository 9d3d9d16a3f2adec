"""How wide a step may be for the tenants that have most sequences running, while others run beside them.

In: how long past steps took, who runs and who waits. Out: how many tokens of the wide_tenants tenants a step computes, and
which of them gives its place to a request that would have to wait for one. Rule: a step takes
at most `slowdown` times as long as it would for the other tenants alone; but a wide_tenants tenant never gets fewer tokens, by
weight, than the widest of the others, so whoever is held back is still served equally. So the bound on what a flood
does to the steps of a tenant that runs n sequences is max(`slowdown`, t(2n) / t(n)): a step of 2n sequences takes what
it takes. Which sequences of a wide_tenants tenant are computed goes round; what each of them computes is the same bits.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from app.engine.scheduling.fair_queue import MAX_LEAD, FairQueue
from app.engine.sequence import Sequence

#: The median of so many steps of one width is what such a step takes.
_NUM_STEPS = 9
#: Widths up to this are told apart; steps of more tokens say little about narrow ones.
_MAX_WIDTH = 256
#: Sequences whose last turn is remembered; beyond that all begin anew.
_MAX_TURNS = 4096
#: Steps for which a tenant that has nothing here any more counts as if it ran: its next request is on its way, and
#: would find a wide step in progress.
_LINGER_STEPS = 8
#: By so much, in the fair queue's prices, tenants may differ before who is behind gets more: then it gets one token
#: more per step for each `_CATCH_UP` that it is behind.
_UNEVEN, _CATCH_UP = 256.0, 128.0


class StepTimes:
    """What a step of so many tokens takes: a line through the medians of what was seen."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._line: tuple[float, float] | None = None

    def observe(self, num_tokens: int, time_s: float) -> None:
        """A step computed so many tokens, decoded or of prompts."""
        if 0 < num_tokens <= _MAX_WIDTH:
            self._seen.setdefault(num_tokens, deque(maxlen=_NUM_STEPS)).append(time_s)
            self._line = None

    def max_step_tokens(self, num_tokens: int, slowdown: float) -> int:
        """The tokens of a step that takes `slowdown` times as long as one of `num_tokens`; at least as many."""
        start_s, token_s = self._fit()
        if token_s <= 0:
            return _MAX_WIDTH if self._seen else num_tokens
        return max(num_tokens, int(slowdown * num_tokens + (slowdown - 1) * start_s / token_s + 1e-6))

    def _fit(self) -> tuple[float, float]:
        """(seconds of a step, seconds of a token), neither below 0; least squares over widths, each counted once.

        With one width only a step counts as all tokens: it errs to the narrow side, and then knows two.
        """
        if self._line is None:
            points = [(float(width), statistics.median(times)) for width, times in self._seen.items()]
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
    """How many sequences a tenant ran, with what weight, and in which step."""

    width: int
    weight: float
    step: int


class TenantIsolation:
    """One engine's. `slowdown` 0: it has no opinion, and costs nothing."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._times = StepTimes()
        self._turns: dict[str, int] = {}  # request id of a wide_tenants tenant's -> the number of its last turn
        self._num_turns = 0
        self._num_steps = 0
        self._recent: dict[str, _RecentWidth] = {}

    def observe(self, num_tokens: int, time_s: float) -> None:
        """`StepTimes.observe`."""
        if self._slowdown:
            self._times.observe(num_tokens, time_s)

    @property
    def is_on(self) -> bool:
        return self._slowdown > 0

    def token_limits(
        self,
        running: SequenceOf[Sequence],
        waiting: Iterable[Sequence] = (),
        counter_of: Callable[[str], float] = lambda _: 0.0,
    ) -> dict[str, int]:
        """Tenants that run more than the mean of all that run, by weight, and how many tokens each may compute.

        `waiting` has a sequence of each tenant that waits: one that does not run counts as if it ran what it last ran,
        or this one. `counter_of`: what the fair queue has counted of a tenant; who is behind gets more, so that those
        who are held back are served equally though the others' prompts are computed whole. Empty: nobody is held back.
        Once per step.
        """
        if not self._slowdown:
            return {}
        widths = Counter(sequence.tenant_id for sequence in running)
        weights = {sequence.tenant_id: sequence.request.weight for sequence in running}
        self._num_steps += 1
        self._add_waiting_and_recent(widths, weights, waiting)
        if len(widths) < 2:
            self._turns.clear()
            return {}
        mean = sum(widths.values()) / sum(weights.values())
        wide_tenants = [tenant_id for tenant_id, width in widths.items() if width > mean * weights[tenant_id]]
        others = [tenant_id for tenant_id in widths if tenant_id not in wide_tenants]
        if not wide_tenants or not others:  # all alike, but for rounding
            return {}
        num_others = sum(widths[tenant_id] for tenant_id in others)
        equal = max(widths[tenant_id] / weights[tenant_id] for tenant_id in others)
        room = self._times.max_step_tokens(num_others, self._slowdown) - num_others
        share = room / sum(weights[tenant_id] for tenant_id in wide_tenants)
        served = max(counter_of(tenant_id) for tenant_id in others)
        rooms: dict[str, int] = {}
        for tenant_id in wide_tenants:
            behind = max(0.0, served - counter_of(tenant_id) - _UNEVEN)
            rooms[tenant_id] = max(1, round((max(share, equal) + behind / _CATCH_UP) * weights[tenant_id]))
        return rooms

    def make_places(
        self,
        running: list[Sequence],
        queue: FairQueue,
        wide_tenants: Container[str],
        num_free: int,
        displace: Callable[[Sequence], None],
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Where all places are taken, wide tenants' youngest give theirs to the first request of each other tenant.

        `displace` takes a sequence out of `running` and queues it again. What it had computed mostly stays in the
        prefix cache, and it goes on when a place is free. Returns for whom there is a place now, and who gave it.
        """
        preferred: list[Sequence] = []
        displaced: list[Sequence] = []
        least = queue.least_waiting()
        for waiting_sequence in queue.first_of_each():
            num_free -= 1
            if num_free >= 0:
                continue
            victim = self.victim(running, waiting_sequence, wide_tenants, queue.counter_of, least)
            if victim is None:
                continue
            displace(victim)
            displaced.append(victim)
            preferred.append(waiting_sequence)
        return preferred, displaced

    def take_turns(self, running: SequenceOf[Sequence], token_limit_of: dict[str, int]) -> set[str]:
        """Request ids of wide tenants' streams that wait for another step; what is left of the room goes to prompts.

        `token_limit_of`, tokens by tenant, is written in place. While a tenant has prompts to compute they keep half of it.
        """
        skipped: set[str] = set()
        for tenant_id, room in token_limit_of.items():
            mine = [sequence for sequence in running if sequence.tenant_id == tenant_id]
            decoding = [each for each in mine if each.num_tokens - each.num_computed == 1]
            number = min(len(decoding), room if len(decoding) == len(mine) else max(room // 2, 1))
            chosen = self.next_turn(decoding, number)
            skipped |= {each.request_id for each in decoding} - {each.request_id for each in chosen}
            token_limit_of[tenant_id] = max(room - number, int(number == 0))
        return skipped

    def _add_waiting_and_recent(
        self, widths: Counter[str], weights: dict[str, float], waiting: Iterable[Sequence]
    ) -> None:
        """Add those that wait, or ran a moment ago, to those that run; both are written in place."""
        lately, now = self._recent, self._num_steps
        for tenant_id, width in widths.items():
            lately[tenant_id] = _RecentWidth(width, weights[tenant_id], now)
        for sequence in waiting:
            if sequence.tenant_id not in widths:
                before = lately.get(sequence.tenant_id)
                width = 1 if before is None else before.width
                lately[sequence.tenant_id] = _RecentWidth(width, sequence.request.weight, now)
        for tenant_id, (width, weight, last) in list(lately.items()):
            if now - last > _LINGER_STEPS:
                del lately[tenant_id]
            elif tenant_id not in widths:
                widths[tenant_id], weights[tenant_id] = width, weight

    def next_turn(self, waiting: SequenceOf[Sequence], number: int) -> list[Sequence]:
        """Those of a wide tenant's sequences that are computed in this step: whose last time is longest ago."""
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
        """Whose place goes to a waiting sequence: the youngest of the widest tenant's, if that stays the wider one.

        Nobody's, if the one that asks was served `MAX_LEAD` more already than the widest tenant, or than the least
        served of those that wait (`FairQueue.least_waiting`): it waits for a place in fair order.
        """
        widths = Counter(sequence.tenant_id for sequence in running)
        weights = {sequence.tenant_id: sequence.request.weight for sequence in running}
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
