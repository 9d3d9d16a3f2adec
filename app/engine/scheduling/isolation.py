"""How wide a step may be for the tenants that have most sequences running, while others run beside them.

In: how long past steps took, and who runs. Out: how many tokens of the wide tenants a step computes. Rule: a step takes
at most `slowdown` times as long as it would for the other tenants alone; but a wide tenant never gets fewer tokens, by
weight, than the widest of the others, so whoever is held back is still served equally. So the bound on what a flood
does to the steps of a tenant that runs n sequences is max(`slowdown`, t(2n) / t(n)): a step of 2n sequences takes what
it takes. Which sequences of a wide tenant are computed goes round; what each of them computes is the same bits.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence as SequenceOf

from app.engine.sequence import Sequence

#: The median of so many steps of one width is what such a step takes.
_NUM_STEPS = 9
#: Widths up to this are told apart; steps of more tokens say little about narrow ones.
_MAX_WIDTH = 256
#: Sequences whose last turn is remembered; beyond that all begin anew.
_MAX_TURNS = 4096


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

    def widest(self, num_tokens: int, slowdown: float) -> int:
        """The tokens of a step that takes `slowdown` times as long as one of `num_tokens`; at least as many."""
        start_s, token_s = self._fitted()
        if token_s <= 0:
            return _MAX_WIDTH if self._seen else num_tokens
        return max(num_tokens, int(slowdown * num_tokens + (slowdown - 1) * start_s / token_s + 1e-6))

    def _fitted(self) -> tuple[float, float]:
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


class Isolation:
    """One engine's. `slowdown` 0: it has no opinion, and costs nothing."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._times = StepTimes()
        self._turns: dict[str, int] = {}  # request id of a wide tenant's -> the number of its last turn
        self._num_turns = 0

    def observe(self, num_tokens: int, time_s: float) -> None:
        """`StepTimes.observe`."""
        if self._slowdown:
            self._times.observe(num_tokens, time_s)

    def wide(self, running: SequenceOf[Sequence]) -> dict[str, int]:
        """Tenants that run more than the mean of all that run, by weight, and how many tokens each may compute.

        Empty: nobody is held back.
        """
        if not self._slowdown:
            return {}
        widths = Counter(sequence.tenant_id for sequence in running)
        if len(widths) < 2:
            self._turns.clear()
            return {}
        weights = {sequence.tenant_id: sequence.request.weight for sequence in running}
        mean = len(running) / sum(weights.values())
        wide = [tenant_id for tenant_id, width in widths.items() if width > mean * weights[tenant_id]]
        others = [tenant_id for tenant_id in widths if tenant_id not in wide]
        if not wide or not others:  # all alike, but for rounding
            return {}
        num_others = sum(widths[tenant_id] for tenant_id in others)
        equal = max(widths[tenant_id] / weights[tenant_id] for tenant_id in others)
        room = self._times.widest(num_others, self._slowdown) - num_others
        share = room / sum(weights[tenant_id] for tenant_id in wide)
        return {tenant_id: max(1, round(max(share, equal) * weights[tenant_id])) for tenant_id in wide}

    def turn(self, waiting: SequenceOf[Sequence], number: int) -> list[Sequence]:
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
