"""How many prompt tokens a step takes in while others decode, and how prompts share them.

In: how long past steps took, and prompts in order of age. Out: a budget of prompt tokens, and its division. Rules: a
step with prompts takes about `target_s`, or twice as long as the streams beside them take alone if that is longer, so
that prompts always go on; and a long prompt delays others by a bounded factor. A budget of tokens from a limit on the
time between tokens is Sarathi-Serve's (https://arxiv.org/abs/2403.02310); there it is profiled beforehand, here it
follows what steps take on this machine. Who starts is for admission to decide.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Container, Set

from app.engine.sequence import Sequence

#: A smaller share wastes more on starting a chunk than it gains in fairness.
MIN_SHARE = 16

#: How much of past steps with prompts stays in the next one's estimate, beside the newest.
_MEMORY = 0.5
#: The median of so many steps without prompts is what decoding takes alone: one that the machine held up says nothing.
_NUM_ALONE = 9


class PrefillBudget:
    """The prompt tokens of one engine's next step. Without a target (0) it has no opinion."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._alone_s: deque[float] = deque(maxlen=_NUM_ALONE)
        self._median_s: float | None = None  # of these, once it was asked for
        self._num_alone = 1  # sequences in the last step without prompts
        self._num_tokens = self._time_s = 0.0  # prompt tokens of past steps and the seconds they added, fading

    def observe(self, num_decoding: int, num_prompt_tokens: int, time_s: float) -> None:
        """A step with so many decoding sequences, and so many prompt tokens beside them, took `time_s` seconds."""
        if not num_prompt_tokens:
            self._alone_s.append(time_s)
            self._median_s = None
            self._num_alone = max(num_decoding, 1)
            return
        self._num_tokens = _MEMORY * self._num_tokens + num_prompt_tokens
        self._time_s = _MEMORY * self._time_s + max(time_s - self._decoding_s(num_decoding), 0.0)

    def max_tokens(self, num_decoding: int, room: int) -> int:
        """Prompt tokens beside `num_decoding` decoded ones, `room` at most."""
        if not num_decoding or not self._target_s:
            return room
        least = min(room, max(num_decoding, MIN_SHARE))
        if not self._num_tokens:
            return least  # nothing is known yet
        decoding_s = self._decoding_s(num_decoding)
        allowed = max(self._target_s - decoding_s, decoding_s) * self._num_tokens
        return room if allowed >= room * self._time_s else max(int(allowed / self._time_s), least)

    def _decoding_s(self, num_decoding: int) -> float:
        """Seconds of a step with so many sequences and no prompts: what was measured, or the certain share of it."""
        if not self._alone_s:
            return 0.0
        if self._median_s is None:
            self._median_s = statistics.median(self._alone_s)
        return self._median_s * min(num_decoding / self._num_alone, 1.0)


def split_prefill(prefills: list[Sequence], budget: int, waiting_tenants: Set[str]) -> list[int]:
    """Tokens per prompt, adding up to at most `budget`; what is left goes to waiting requests first.

    Tenants with prompts to compute, running or waiting, get equal shares. A tenant's oldest prompt takes at most half
    of its tenant's share while others of the tenant want some.
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
    """Cut what wide tenants' prompts take to their room; both are written in place, and nobody else's is cut."""
    for index, sequence in enumerate(prefills):
        room = token_limit_of.get(sequence.tenant_id)
        if room is not None:
            counts[index] = min(counts[index], room)
            token_limit_of[sequence.tenant_id] = room - counts[index]


def fill_prefill(prefills: list[Sequence], counts: list[int], budget: int, wide_tenants: Container[str] = ()) -> None:
    """Give what is left to the oldest first, but nothing to wide tenants; `counts` is written in place."""
    for index, sequence in enumerate(prefills):
        if budget <= 0:
            return
        if sequence.tenant_id in wide_tenants:
            continue
        more = min(sequence.num_pending - counts[index], budget)
        counts[index] += more
        budget -= more
