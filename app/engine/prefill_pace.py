"""How many prompt tokens a step takes in while others decode, so that nobody's stream stands still for long.

In: how long steps with prompt tokens took. Out: a number of tokens for the next one. Rule: such a step takes about
`target_s`; but prompts get at least as many tokens as are decoded in it, so that they end, and it takes at most about
twice as long as without them. A budget of tokens from a limit on the time between tokens is Sarathi-Serve's
(https://arxiv.org/abs/2403.02310); there it is profiled beforehand, here it follows what steps take on this machine.
"""

from __future__ import annotations

from app.engine.prefill_split import MIN_SHARE

#: What a step's time and tokens count for in the next one's estimate, beside the newest.
_MEMORY = 0.5


class PrefillPace:
    """The prompt tokens of one engine's next step. Without a target (0) it has no opinion."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._num_tokens = self._time_s = 0.0  # of past steps, the older the less

    def observe(self, num_tokens: int, time_s: float) -> None:
        """A step of `num_tokens`, some of them prompts', took `time_s` seconds."""
        self._num_tokens = _MEMORY * self._num_tokens + num_tokens
        self._time_s = _MEMORY * self._time_s + time_s

    def max_tokens(self, num_decoding: int, room: int) -> int:
        """Prompt tokens beside `num_decoding` decoded ones, `room` at most."""
        if not num_decoding or not self._target_s:
            return room
        least = max(num_decoding, MIN_SHARE)
        if not self._num_tokens:
            return min(room, least)  # nothing is known yet
        # As many tokens as the last steps would have had in the target's time: where that settles, steps take so long,
        # whatever one costs before its first token.
        allowed = self._target_s * self._num_tokens - num_decoding * self._time_s
        return room if allowed >= room * self._time_s else max(int(allowed / self._time_s), min(room, least))
