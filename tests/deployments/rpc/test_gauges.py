"""Ray drops the series of a gauge that is not set again, so gauges that follow changes are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from app.deployments.ingress.metrics import IngressMetrics
from app.deployments.rpc import gauges as exported
from app.deployments.rpc.gauges import repeat_gauges
from app.deployments.store.metrics import TierMetrics


async def test_gauges_that_follow_changes_are_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[str, str | None], list[float]] = {}

    class RecordedGauge:
        def __init__(self, name: str, *_: Any, **__: Any) -> None:
            self._name = name

        def set(self, value: float, tags: Mapping[str, str]) -> None:
            told.setdefault((self._name, tags.get("tier")), []).append(value)

    monkeypatch.setattr(exported, "Gauge", RecordedGauge)
    monkeypatch.setattr(exported, "REPEAT_S", 0)
    ingress, tiers = IngressMetrics(lambda: 110.0), TierMetrics()
    ingress.adapters("small", 3)
    ingress.adapters("large", 1)
    ingress.adapters("small", 4)
    tiers.set_size("host", 700, 2, 1000)
    tiers.set_size("disk", 900, 4)
    repeating = asyncio.create_task(repeat_gauges((*ingress.gauges, *tiers.gauges)))
    async with asyncio.timeout(120):
        while len(told[("polylora_adapters_cached", "disk")]) < 4:
            await asyncio.sleep(0)
    repeating.cancel()
    last = {key: values[-1] for key, values in told.items()}
    assert last == {
        ("polylora_registered_adapters", None): 5,
        ("polylora_adapter_bytes", "host"): 700,
        ("polylora_adapters_cached", "host"): 2,
        ("polylora_adapter_bytes", "disk"): 900,
        ("polylora_adapters_cached", "disk"): 4,
    }
    assert all(values.count(values[-1]) >= 4 for values in told.values())
