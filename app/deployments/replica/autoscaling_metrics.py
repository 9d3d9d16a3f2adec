"""A replica's pending work and capacity, for the autoscaler (`app.deployments.placement.autoscaling.Demand`).

Every sample has all fields, and all are numbers: Serve stops asking for good after the first answer with anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from app.engine.stats import EngineStats

#: An adapter is in demand for this long after a request for it.
DEMAND_S = 30.0
#: Shortest span over which the token rate is measured.
MIN_SPAN_S = 0.5
#: The highest measured rate decays by this factor per second.
RATE_DECAY = 0.995
#: Assumed length of answers before any has finished.
FIRST_ANSWER_TOKENS = 64.0


class AutoscalingMetrics:
    """One per replica. `clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rank_rows: dict[str, int] = {}  # of adapters that were on the device
        self._rate = 0.0
        self._last: tuple[float, int, bool] | None = None  # (time, tokens computed until then, whether there was work)

    def sample(self, stats: EngineStats, num_waiting_for_adapters: int, in_demand: Collection[str]) -> dict[str, float]:
        """The current numbers. in_demand: digests requested within `DEMAND_S`."""
        num_waiting = stats.num_waiting + num_waiting_for_adapters
        self._measure_rate(stats, self._clock())
        self._rank_rows |= {item.digest: item.num_rows for item in stats.residents}
        self._rank_rows = {digest: rows for digest, rows in self._rank_rows.items() if digest in in_demand}
        known = list(self._rank_rows.values())
        usual = sum(known) / len(known) if known else 0.0  # for adapters that were never on the device
        rows = sum(self._rank_rows.get(digest, usual) for digest in in_demand)
        num_started = max(1, stats.num_finished + stats.num_aborted + stats.num_running)
        prompt = stats.num_prompt_tokens / num_started
        answer = stats.num_tokens_generated / stats.num_finished if stats.num_finished else FIRST_ANSWER_TOKENS
        num_used = stats.num_blocks - stats.num_blocks_free
        return {
            "work_tokens": num_waiting * (prompt + answer) + stats.num_running * answer / 2,
            "tokens_per_s": self._rate,
            "adapter_rows": float(rows),
            "num_rank_rows": float(stats.num_rank_rows),
            "kv_used": num_used / stats.num_blocks if stats.num_blocks else 0.0,
        }

    def _measure_rate(self, stats: EngineStats, now_s: float) -> None:
        """Keep the highest token rate between two samples that both had work."""
        has_work = stats.num_running + stats.num_waiting > 0
        if self._last is not None:
            since_s, tokens, had_work = self._last
            span_s = now_s - since_s
            if span_s < MIN_SPAN_S:
                return
            self._rate *= RATE_DECAY**span_s
            if had_work and has_work:
                self._rate = max(self._rate, (stats.num_tokens_computed - tokens) / span_s)
        self._last = (now_s, stats.num_tokens_computed, has_work)
