"""The device as a tier: every write and every need is counted once, and what is held is what is resident.

Ray drops the series of a gauge that is not set again, so gauges that follow changes are repeated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from app.deployments.ingress import metrics as exported
from app.deployments.ingress.metrics import DeviceMetrics, EngineMetrics, IngressMetrics, TierMetrics, repeat_gauges
from app.deployments.store.counts import TierCounts
from app.engine.adapters.lora import TARGETS
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.request import SamplingParams, Usage
from tests.fakes import FakeBackend, fake_adapter, fake_request, fake_spec


def test_the_devices_counts_are_the_engines() -> None:
    limits = BackendLimits(num_kv_blocks=32, block_size=8, adapter_rank_rows=32, rank_alignment=8, max_adapter_slots=8)
    engine = Engine(FakeBackend(limits), EngineConfig())
    counts = TierCounts()
    metrics = DeviceMetrics(counts, fake_spec())
    metrics.update(engine.stats())
    assert set(counts.of("device").values()) == {0}
    adapters = [fake_adapter(f"a{index}", rank) for index, rank in enumerate((8, 16, 8, 30, 8))]
    rng = random.Random(4)
    for index in range(60):
        adapter = rng.choice([None, *adapters])
        engine.submit(fake_request(f"r{index}", [1, 2], adapter), adapter)
        if rng.random() < 0.5:
            engine.step()
        if rng.random() < 0.2:
            metrics.update(engine.stats())
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    metrics.update(stats)
    found = counts.of("device")
    assert (found["hits"], found["misses"]) == (stats.num_adapter_hits, stats.num_adapter_misses)
    assert found["loads"] == stats.num_adapter_writes == found["misses"] > 0
    assert found["evictions"] == stats.num_adapter_evictions > 0
    assert abs(found["load_s"] - stats.adapter_write_s) < 1e-9
    assert abs(found["loaded_bytes"] - stats.num_adapter_write_bytes) <= stats.num_adapter_writes
    spec = fake_spec()
    row_bytes = sum(4 * sum(spec.target_shape(0, target)) for target in TARGETS)
    assert found["held_bytes"] == row_bytes * sum(item.num_rows for item in stats.residents) > 0
    assert found["held_adapters"] == len(stats.residents)
    engine.keep_adapters([])
    engine.step()
    metrics.update(engine.stats())
    assert counts.of("device") == found, "nothing happened"


def test_a_client_that_left_is_neither_an_answer_nor_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float, dict[str, str]]] = []

    class Recorded:
        def __init__(self, name: str, *_: Any, **__: Any) -> None:
            self._name = name

        def inc(self, value: float = 1, tags: Mapping[str, str] | None = None) -> None:
            told.append((self._name, value, dict(tags or {})))

        observe = inc

    for kind in ("Counter", "Histogram"):
        monkeypatch.setattr(exported, kind, Recorded)
    metrics = IngressMetrics()
    for status, expected in ((200, "2xx"), (404, "4xx"), (499, "499"), (503, "5xx")):
        told.clear()
        usages = [Usage(5, 4, 3), None]
        metrics.request("chat", status, arrival_s=1.0, first_s=None, is_adapter=True, usages=usages)
        assert ("polylora_requests", 1, {"route": "chat", "status": expected, "kind": "adapter"}) in told
        assert ("polylora_completion_tokens", 3, {"kind": "adapter"}) in told, "computed is computed"
        assert ("polylora_request_seconds" in {name for name, *_ in told}) == (status != 499), "there was no last token"


def test_times_of_tokens_are_those_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[float]] = {}

    class RecordedHistogram:
        def __init__(self, name: str, *_: Any, **__: Any) -> None:
            self._name = name

        def observe(self, value: float, tags: Mapping[str, str]) -> None:
            assert tags == {"route": "chat"}
            told.setdefault(self._name, []).append(value)

    monkeypatch.setattr(exported, "Histogram", RecordedHistogram)
    monkeypatch.setattr(exported, "time", SimpleNamespace(time=lambda: 110.0))
    metrics = IngressMetrics()
    several = [Usage(5, 4, 11), Usage(5, 4, 21)]
    metrics.request("chat", 200, arrival_s=100.0, first_s=102.0, is_adapter=False, usages=several)
    metrics.request("chat", 200, arrival_s=100.0, first_s=103.0, is_adapter=False, usages=[Usage(5, 4, 1)])
    metrics.request("chat", 499, arrival_s=100.0, first_s=104.0, is_adapter=False, usages=several)
    metrics.request("chat", 400, arrival_s=None, first_s=None, is_adapter=False, usages=[])
    assert told["polylora_time_to_first_token_seconds"] == [2.0, 3.0, 4.0]
    assert told["polylora_time_per_output_token_seconds"] == [8.0 / 20]


def test_what_an_engine_holds_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[str, str], float] = {}

    class Recorded:
        def __init__(self, name: str, *_: Any, **__: Any) -> None:
            self._name = name

        def set(self, value: float, tags: Mapping[str, str]) -> None:
            told[self._name, tags["state"]] = value

        def inc(self, value: float) -> None:
            told[self._name, ""] = told.get((self._name, ""), 0) + value

    for kind in ("Gauge", "Counter"):
        monkeypatch.setattr(exported, kind, Recorded)
    limits = BackendLimits(num_kv_blocks=6, block_size=8, adapter_rank_rows=32, rank_alignment=8, max_adapter_slots=8)
    engine = Engine(FakeBackend(limits), EngineConfig(max_batch_sequences=2, max_context=40))
    metrics, adapter = EngineMetrics(), fake_adapter("a", 16)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    for index in range(3):
        engine.submit(fake_request(f"r{index}", [1, 2, index], adapter, sampling=sampling), adapter)
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        metrics.update(stats)
        assert told["polylora_engine_requests", "running"] == stats.num_running
        assert told["polylora_engine_requests", "waiting"] == stats.num_waiting
        blocks = [told["polylora_kv_blocks", state] for state in ("used", "cached", "free")]
        assert (sum(blocks), min(blocks) >= 0) == (6, True)
        assert blocks[0] == stats.num_blocks - stats.num_blocks_free
        assert (told["polylora_rank_rows", "held"], told["polylora_rank_rows", "free"]) == (16, 16)
    assert told["polylora_preemptions", ""] == engine.stats().num_preemptions > 0


async def test_gauges_that_follow_changes_are_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[str, str | None], list[float]] = {}

    class RecordedGauge:
        def __init__(self, name: str, *_: Any, **__: Any) -> None:
            self._name = name

        def set(self, value: float, tags: Mapping[str, str]) -> None:
            told.setdefault((self._name, tags.get("tier")), []).append(value)

    monkeypatch.setattr(exported, "Gauge", RecordedGauge)
    monkeypatch.setattr(exported, "REPEAT_S", 0)
    ingress, tiers = IngressMetrics(), TierMetrics()
    ingress.adapters(3)
    ingress.adapters(5)
    tiers.holds("host", 700, 2)
    tiers.holds("disk", 900, 4)
    repeating = asyncio.create_task(repeat_gauges((*ingress.gauges, *tiers.gauges)))
    async with asyncio.timeout(120):
        while len(told[("polylora_adapters_held", "disk")]) < 4:
            await asyncio.sleep(0)
    repeating.cancel()
    last = {key: values[-1] for key, values in told.items()}
    assert last == {
        ("polylora_registered_adapters", None): 5,
        ("polylora_adapter_bytes", "host"): 700,
        ("polylora_adapters_held", "host"): 2,
        ("polylora_adapter_bytes", "disk"): 900,
        ("polylora_adapters_held", "disk"): 4,
    }
    assert all(values.count(values[-1]) >= 4 for values in told.values())
