"""Shared parts of all processes' metrics: gauges that Ray does not drop, and histogram buckets of seconds.

Ray drops a gauge's series that is not set again, so gauges that follow changes are `SteadyGauge`s, which
`repeat_gauges` sets at intervals. Labels have few values each (route, status class, base or adapter, tier, state): of
adapters, of which there may be millions, only the busiest (`tenancy.usage.adapter_stats`), and of tenants the largest
(`tenancy.usage.tenant_throughput`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ray.util.metrics import Gauge

#: Upper bounds of histogram buckets, in seconds.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Ray keeps a gauge for two of its reports, which are 10 s apart.
REPEAT_S = 5.0


class SteadyGauge:
    """A gauge that is set when its value changes, and again at every `repeat`."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
        self._gauge = Gauge(name, description, tag_keys=tag_keys)
        self._values: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float, **tags: str) -> None:
        self._values[tuple(sorted(tags.items()))] = value
        self._gauge.set(value, tags=tags)

    def repeat(self) -> None:
        for tags, value in self._values.copy().items():  # other threads set tiers' gauges
            self._gauge.set(value, tags=dict(tags))


class RepeatableGauge(Protocol):
    def repeat(self) -> None: ...


async def repeat_gauges(gauges: Sequence[RepeatableGauge]) -> None:
    """Set the gauges again at intervals, until cancelled."""
    while True:
        await asyncio.sleep(REPEAT_S)
        for gauge in gauges:
            gauge.repeat()
