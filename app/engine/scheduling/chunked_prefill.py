"""The prefill budget: how many prompt tokens a step computes while others decode, and how prompts share them.

A step with prompts takes about `target_s`, or twice as long as decoding alone if that is longer, so that prompts always
make progress. A long prompt delays others by a bounded factor. A token budget from a limit on the time between tokens
is Sarathi-Serve's (https://arxiv.org/abs/2403.02310); there it is profiled beforehand, here it follows the measured
step times. Admission decides which prompts start.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Container, Set

from app.engine.sequence import Sequence

#: The smallest share of a tenant; a smaller chunk costs more to start than it gains in fairness.
MIN_SHARE = 16

#: The weight of past steps with prompts in the next estimate; the newest has weight 1.
_MEMORY = 0.5
#: The time of decoding alone is the median of so many steps without prompts, which ignores outliers.
_NUM_ALONE = 9


class PrefillBudget:
    """The number of prompt tokens in the next step. A target of 0 means no limit."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._alone_s: deque[float] = deque(maxlen=_NUM_ALONE)
        self._median_s: float | None = None  # cached median of `_alone_s`
        self._num_alone = 1  # sequences in the last step without prompts
        self._num_tokens = self._time_s = 0.0  # prompt tokens of past steps and the seconds they added, decaying

    def observe(self, num_decoding: int, num_prompt_tokens: int, time_s: float) -> None:
        """Record the duration of a step with so many decoding sequences and prompt tokens."""
        if not num_prompt_tokens:
            self._alone_s.append(time_s)
            self._median_s = None
            self._num_alone = max(num_decoding, 1)
            return
        self._num_tokens = _MEMORY * self._num_tokens + num_prompt_tokens
        self._time_s = _MEMORY * self._time_s + max(time_s - self._decoding_s(num_decoding), 0.0)

    def max_tokens(self, num_decoding: int, room: int) -> int:
        """Prompt tokens in a step with `num_decoding` decoding sequences, at most `room`."""
        if not num_decoding or not self._target_s:
            return room
        least = min(room, max(num_decoding, MIN_SHARE))
        if not self._num_tokens:
            return least  # no measurement yet
        decoding_s = self._decoding_s(num_decoding)
        allowed = max(self._target_s - decoding_s, decoding_s) * self._num_tokens
        return room if allowed >= room * self._time_s else max(int(allowed / self._time_s), least)

    def _decoding_s(self, num_decoding: int) -> float:
        """Estimated seconds of a step that decodes so many sequences; at most the measured median."""
        if not self._alone_s:
            return 0.0
        if self._median_s is None:
            self._median_s = statistics.median(self._alone_s)
        return self._median_s * min(num_decoding / self._num_alone, 1.0)


def split_prefill(prefills: list[Sequence], budget: int, waiting_tenants: Set[str]) -> list[int]:
    """Tokens per prompt, in total at most `budget`; the rest of the budget goes to waiting requests first.

    Tenants with running or waiting prompts get equal shares. A tenant's oldest prompt takes at most half of its
    tenant's share while others of the tenant have tokens to compute.
    """
    counts = [0] * len(prefills)
    by_tenant: dict[str, list[int]] = {}
    for index, sequence in enumerate(prefills):
        by_tenant.setdefault(sequence.tenant_id, []).append(index)
    share = max(budget // max(1, len(by_tenant.keys() | waiting_tenants)), MIN_SHARE)
    for tenant_id, indices in by_tenant.items():
        left = min(share, budget)
        others = len(indices) > 1 or tenant_id in waiting_tenants
        for rank, index in enumerate(indices):
            cap = -(-left // 2) if rank == 0 and others else left
            counts[index] = min(prefills[index].num_pending, cap)
            left -= counts[index]
            budget -= counts[index]
    return counts


def limit_prefill(prefills: list[Sequence], counts: list[int], token_limit_of: dict[str, int]) -> None:
    """Cut the counts of tenants with a token limit; `counts` and `token_limit_of` are written in place."""
    for index, sequence in enumerate(prefills):
        room = token_limit_of.get(sequence.tenant_id)
        if room is not None:
            counts[index] = min(counts[index], room)
            token_limit_of[sequence.tenant_id] = room - counts[index]


def limit_scored(items: list[tuple[Sequence, int]], max_rows: int) -> None:
    """Cut the counts of prompts with log-probabilities, so that a step has at most `max_rows` rows of logits.

    A row is one of them for each such token, and one for each sequence that draws a token. `items` is written in place.
    """
    room = max_rows - len(items)
    for index, (sequence, count) in enumerate(items):
        start = sequence.num_computed
        scored = sequence.scored_tokens(start, start + count)
        if not scored:
            continue
        num_rows = len(scored) + (start + count == sequence.num_tokens)
        if num_rows > 1 + room:
            items[index], num_rows = (sequence, scored.start + 1 + room - start), 1 + room
        room -= num_rows - 1


def fill_prefill(prefills: list[Sequence], counts: list[int], budget: int, heavy_tenants: Container[str] = ()) -> None:
    """Give the rest of the budget to the oldest prompts, but not to `heavy_tenants`; `counts` is written in place."""
    for index, sequence in enumerate(prefills):
        if budget <= 0:
            return
        if sequence.tenant_id in heavy_tenants:
            continue
        more = min(sequence.num_pending - counts[index], budget)
        counts[index] += more
        budget -= more
