"""Prometheus metrics of an ingress (`ray.util.metrics`): requests, tokens, latencies.

Labels have few values each; `rpc.gauges` explains why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ray.util.metrics import Counter, Histogram

from app.deployments.ingress.error_responses import TABLE, ClientGone
from app.deployments.rpc.gauges import SECONDS, SteadyGauge
from app.engine.request import Usage

#: The interval of the timer whose lateness is measured.
LAG_INTERVAL_S = 0.25
_TOKEN_SECONDS = [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5]


class IngressMetrics:
    """One per ingress process. `clock` gives Unix time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests = Counter("polylora_requests", "Requests answered.", tag_keys=("route", "status", "kind"))
        self._prompt_tokens = Counter("polylora_prompt_tokens", "Prompt tokens.", tag_keys=("kind",))
        self._cached_tokens = Counter("polylora_cached_tokens", "Prompt tokens found in the cache.", tag_keys=("kind",))
        self._completion_tokens = Counter("polylora_completion_tokens", "Generated tokens.", tag_keys=("kind",))
        self._latency_s = Histogram(
            "polylora_request_seconds", "From arrival to the last token.", boundaries=list(SECONDS), tag_keys=("route",)
        )
        self._first_token_s = Histogram(
            "polylora_time_to_first_token_seconds",
            "From arrival to the first text.",
            boundaries=list(SECONDS),
            tag_keys=("route",),
        )
        self._per_token_s = Histogram(
            "polylora_time_per_output_token_seconds",
            "Between tokens of an answer, on average.",
            boundaries=_TOKEN_SECONDS,
            tag_keys=("route",),
        )
        self._loop_lag_s = Histogram(
            "polylora_ingress_event_loop_lag_seconds",
            "How late a timer of the ingress's event loop is, four times a second. Nothing should hold the loop for "
            "more than 0.05 s: all streams of the process wait meanwhile.",
            boundaries=[0.001, *SECONDS],
        )
        self._adapters = SteadyGauge("polylora_registered_adapters", "Adapters in the registry.")
        self._num_adapters: dict[str, int] = {}
        self.gauges = (self._adapters,)

    def request(
        self,
        route: str,
        status: int,
        *,
        arrival_s: float | None,
        first_s: float | None,
        is_adapter: bool,
        usages: Sequence[Usage | None],
    ) -> None:
        """Record a finished request. `status` is what the client got, 499 if it left early.

        arrival_s, first_s: Unix times of arrival and of the first text, if known.
        """
        kind = {"kind": "adapter" if is_adapter else "base"}
        has_left = status == TABLE[ClientGone].status
        status_class = str(status) if has_left else f"{status // 100}xx"
        self._requests.inc(tags={"route": route, "status": status_class} | kind)
        known = [usage for usage in usages if usage is not None]
        for counter, number in (
            (self._prompt_tokens, sum(usage.prompt_tokens for usage in known)),
            (self._cached_tokens, sum(usage.cached_tokens for usage in known)),
            (self._completion_tokens, sum(usage.completion_tokens for usage in known)),
        ):
            if number:
                counter.inc(number, tags=kind)
        now_s, tags = self._clock(), {"route": route}
        if arrival_s is not None and not has_left:
            self._latency_s.observe(now_s - arrival_s, tags=tags)
        if arrival_s is not None and first_s is not None:
            self._first_token_s.observe(first_s - arrival_s, tags=tags)
        longest = max((usage.completion_tokens for usage in known), default=0)
        if first_s is not None and status == 200 and longest > 1:
            self._per_token_s.observe((now_s - first_s) / (longest - 1), tags=tags)

    async def measure_loop_lag(self) -> None:
        """Measure how late a timer of this event loop is, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._loop_lag_s.observe(max(loop.time() - due_s, 0.0))

    def adapters(self, base_name: str, number: int) -> None:
        """Set the number of registered adapters of a base model."""
        self._num_adapters[base_name] = number
        self._adapters.set(sum(self._num_adapters.values()))
