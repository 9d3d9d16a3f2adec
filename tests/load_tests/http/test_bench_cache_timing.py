"""The benchmark of what cached prompts tell, on a virtual clock: it sees what is shared, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from load_tests.http.bench_cache_timing import ATTACKER, VICTIM, Bench, EngineTenants, auc
from tests.fakes import FakeBackend, fake_spec


class Timed(FakeBackend):
    """A millisecond per token."""

    now_s = 0.0

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.now_s += 0.001 * len(batch.token_ids)
        return super().forward(batch)


def test_what_a_tenant_asked_before_is_seen_and_what_another_asked_is_not() -> None:
    spec = fake_spec()
    backend = Timed(BackendLimits(64, 16, 0, 8, 1), spec)
    engine = Engine(backend, EngineConfig(speculative_decoding="off"), clock=lambda: backend.now_s)
    bench = Bench(EngineTenants(engine, lambda: backend.now_s).ask, spec.vocab_size, 33)
    assert bench.measure(40, ATTACKER) == (1.0, 1.0, 1.0)
    anothers = bench.measure(40, VICTIM)
    assert anothers.value == pytest.approx(0.5, abs=0.02), "prompts that begin alike by chance"
    assert anothers.low <= anothers.value <= anothers.high


def test_a_name_that_is_refused_later_is_told_from_another() -> None:
    rng = np.random.default_rng(0)

    def ask(_: str, prompt: tuple[int, ...]) -> float:
        raise AssertionError(f"{prompt} is asked")

    def tells(name: str) -> float:
        return float(rng.normal(1.0 if name.startswith("victim") else 0.0))

    def tells_nothing(_: str) -> float:
        return float(rng.normal())

    bench = Bench(ask, 100, 33)
    found = bench.measure_names(400, tells)
    assert found.low < found.value < found.high < 0.4
    same = bench.measure_names(400, tells_nothing)
    assert same.low < same.value < same.high
    assert same.value == pytest.approx(0.5, abs=0.1)


def test_the_area_under_the_curve() -> None:
    assert auc([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert auc([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert auc([1.0, 2.0], [1.0, 2.0]) == 0.5
    assert auc([1.0], [1.0, 2.0]) == 0.75
    with pytest.raises(ValueError, match="none of one"):
        auc([], [1.0])
