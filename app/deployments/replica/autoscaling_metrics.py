"""What a replica has to do and can do, for the autoscaler.

In: the engine's counts, and the adapters that requests used. Out: numbers by name, the fields of
`app.deployments.placement.autoscaling.Demand`. Rule: numbers only, always all of them: Serve stops asking for good
after the first answer that holds anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from app.engine.stats import EngineStats

#: An adapter is in demand for so long after a request asked for it.
DEMAND_S = 30.0
#: A replica's rate is measured over at least this long.
MIN_SPAN_S = 0.5
#: The highest rate that was measured counts less with time: this part of it is left after a second.
RATE_DECAY = 0.995
#: Answers before there are any are taken to have so many tokens.
FIRST_ANSWER_TOKENS = 64.0


class AutoscalingMetrics:
    """One per replica. `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rank_rows: dict[str, int] = {}  # of adapters that were on the device
        self._rate = 0.0
        self._before: tuple[float, int, bool] | None = None  # when, tokens computed until then, whether there was work

    def sample(self, stats: EngineStats, num_waiting_for_adapters: int, in_demand: Collection[str]) -> dict[str, float]:
        """The numbers as of now. in_demand: digests of the adapters that were asked for in the last `DEMAND_S`."""
        num_waiting = stats.num_waiting + num_waiting_for_adapters
        self._measure_rate(stats, self._clock())
        self._rank_rows |= {item.digest: item.num_rows for item in stats.residents}
        self._rank_rows = {digest: rows for digest, rows in self._rank_rows.items() if digest in in_demand}
        known = list(self._rank_rows.values())
        usual = sum(known) / len(known) if known else 0.0  # of those that never were on the device
        rows = sum(self._rank_rows.get(digest, usual) for digest in in_demand)
        num_started = max(1, stats.num_finished + stats.num_aborted + stats.num_running)
        prompt = stats.num_prompt_tokens / num_started
        answer = stats.num_tokens_generated / stats.num_finished if stats.num_finished else FIRST_ANSWER_TOKENS
        held = stats.num_blocks - stats.num_blocks_free
        return {
            "work_tokens": num_waiting * (prompt + answer) + stats.num_running * answer / 2,
            "tokens_per_s": self._rate,
            "adapter_rows": float(rows),
            "num_rank_rows": float(stats.num_rank_rows),
            "kv_used": held / stats.num_blocks if stats.num_blocks else 0.0,
        }

    def _measure_rate(self, stats: EngineStats, now_s: float) -> None:
        """The most tokens a second that were computed while there was work all the time, as far as two samples tell."""
        has_work = stats.num_running + stats.num_waiting > 0
        if self._before is not None:
            since_s, tokens, had_work = self._before
            span_s = now_s - since_s
            if span_s < MIN_SPAN_S:
                return
            self._rate *= RATE_DECAY**span_s
            if had_work and has_work:
                self._rate = max(self._rate, (stats.num_tokens_computed - tokens) / span_s)
        self._before = (now_s, stats.num_tokens_computed, has_work)
