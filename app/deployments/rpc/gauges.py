"""What the metrics of every process share: gauges that Ray does not forget, and the buckets of seconds.

In: values as they change. Out: series on Ray's Prometheus port (`ray.util.metrics`). Ray drops the series of a gauge
that nobody sets again, so a gauge that follows changes is a `SteadyGauge`, and `repeat_gauges` sets it at intervals.
Labels take few values each (route, status class, base or adapter, tier, state): of adapters, of which there may be
millions, the busiest only (`tenants.adapter_book`), and of tenants the largest (`tenants.attained`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ray.util.metrics import Gauge

#: Upper bounds of the buckets of histograms of seconds.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: A gauge lives for two of Ray's reports, which are 10 s apart.
REPEAT_S = 5.0


class SteadyGauge:
    """A gauge that is set when its value changes, and once more at every `repeat`."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
        self._gauge = Gauge(name, description, tag_keys=tag_keys)
        self._values: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float, **tags: str) -> None:
        self._values[tuple(sorted(tags.items()))] = value
        self._gauge.set(value, tags=tags)

    def repeat(self) -> None:
        for tags, value in self._values.copy().items():  # tiers are changed by other threads, too
            self._gauge.set(value, tags=dict(tags))


class Repeated(Protocol):
    """What is told again at intervals."""

    def repeat(self) -> None: ...


async def repeat_gauges(gauges: Sequence[Repeated]) -> None:
    """Set the gauges again at intervals, until cancelled."""
    while True:
        await asyncio.sleep(REPEAT_S)
        for gauge in gauges:
            gauge.repeat()
