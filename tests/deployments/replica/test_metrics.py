"""The device as a tier: every write and every need is counted once, and what is held is what is resident."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from app.deployments.replica import metrics as exported
from app.deployments.replica.metrics import DeviceMetrics, EngineMetrics
from app.deployments.store.tier_counters import TierCounters
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.models.linear_modules import DENSE_TARGETS, target_shape
from app.engine.request import SamplingParams
from tests.fakes import FakeBackend, fake_adapter, fake_request, fake_spec


def test_the_devices_counts_are_the_engines() -> None:
    limits = BackendLimits(num_kv_blocks=32, block_size=8, lora_pool_rows=32, rank_alignment=8, max_loras=8)
    engine = Engine(FakeBackend(limits), EngineConfig())
    counts = TierCounters()
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
    row_bytes = sum(4 * sum(target_shape(spec, 0, target)) for target in DENSE_TARGETS)
    assert found["held_bytes"] == row_bytes * sum(item.num_rows for item in stats.residents) > 0
    assert found["held_adapters"] == len(stats.residents)
    engine.pin_adapters([])
    engine.step()
    metrics.update(engine.stats())
    assert counts.of("device") == found, "nothing happened"


def test_what_an_engine_holds_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[str, str], float] = {}

    class Recorded:
        def __init__(self, name: str, *_: Any, **__: Any) -> None:
            self._name = name

        def set(self, value: float, tags: Mapping[str, str]) -> None:
            told[self._name, "".join(tags.values())] = value

        def inc(self, value: float, tags: Mapping[str, str] | None = None) -> None:
            key = self._name, (tags or {}).get("part", "")
            told[key] = told.get(key, 0) + value

    for kind in ("Gauge", "Counter"):
        monkeypatch.setattr(exported, kind, Recorded)
    limits = BackendLimits(num_kv_blocks=6, block_size=8, lora_pool_rows=32, rank_alignment=8, max_loras=8)
    backend = FakeBackend(limits)
    backend.compile_s = 12.5
    engine = Engine(backend, EngineConfig(max_num_seqs=2, max_model_len=40))
    metrics, adapter = EngineMetrics({"load": 2.0, "warm_up": 1.5}), fake_adapter("a", 16)
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
        assert (told["polylora_lora_pool_rows", "used"], told["polylora_lora_pool_rows", "free"]) == (16, 16)
    assert told["polylora_preemptions", ""] == engine.stats().num_preemptions > 0
    assert (told["polylora_startup_seconds", "load"], told["polylora_startup_seconds", "warm_up"]) == (2.0, 1.5)
    assert told["polylora_compile_seconds", ""] == 12.5
    assert told["polylora_engine_info", "cpu"] == 1
    stats = engine.stats()
    assert told["polylora_step_seconds", "base"] == pytest.approx(stats.base_s)
    assert told["polylora_step_seconds", "adapter_load"] == pytest.approx(stats.adapter_write_s)
    assert told.get(("polylora_step_seconds", "lora"), 0.0) == pytest.approx(stats.lora_s)
