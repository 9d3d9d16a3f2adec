"""How many prompt tokens a step takes in while others decode, so that nobody's stream stands still for long.

In: how long steps took. Out: a number of tokens for the next one. Rule: a step with prompts takes about `target_s`, or
twice as long as the streams beside them take alone if that is longer, so that prompts always go on. A budget of tokens
from a limit on the time between tokens is Sarathi-Serve's (https://arxiv.org/abs/2403.02310); there it is profiled
beforehand, here it follows what steps take on this machine.
"""

from __future__ import annotations

import statistics
from collections import deque

from app.engine.scheduling.prefill_split import MIN_SHARE

#: What steps with prompts count for in the next one's estimate, beside the newest.
_MEMORY = 0.5
#: Steps without prompts whose median is what decoding takes alone: one that the machine held up says nothing.
_NUM_ALONE = 9


class PrefillPace:
    """The prompt tokens of one engine's next step. Without a target (0) it has no opinion."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._alone_s: deque[float] = deque(maxlen=_NUM_ALONE)
        self._num_alone = 1  # sequences in the last step without prompts
        self._num_tokens = self._time_s = 0.0  # of prompts in past steps, and what they added; the older the less

    def observe(self, num_decoding: int, num_prompt_tokens: int, time_s: float) -> None:
        """A step of so many sequences that decode, and prompt tokens beside them, took `time_s` seconds."""
        if not num_prompt_tokens:
            self._alone_s.append(time_s)
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
        """What so many take without prompts: as long as those that were seen; the part of it that is sure, if fewer."""
        if not self._alone_s:
            return 0.0
        return statistics.median(self._alone_s) * min(num_decoding / self._num_alone, 1.0)
