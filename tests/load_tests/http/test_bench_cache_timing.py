"""The benchmark of what cached prompts tell, on a virtual clock: it sees what is shared, and nothing else."""

from __future__ import annotations

import pytest

from app.engine.backend import BackendLimits
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from load_tests.http.bench_cache_timing import ATTACKER, VICTIM, Bench, auc
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
    engine = Engine(backend, EngineConfig(speculation="off"), clock=lambda: backend.now_s)
    bench = Bench(engine, spec.vocab_size, 33, lambda: backend.now_s)
    assert bench.measure(40, ATTACKER) == 1.0
    assert bench.measure(40, VICTIM) == pytest.approx(0.5, abs=0.02), "prompts that begin alike by chance"


def test_the_area_under_the_curve() -> None:
    assert auc([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert auc([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert auc([1.0, 2.0], [1.0, 2.0]) == 0.5
    assert auc([1.0], [1.0, 2.0]) == 0.75
    with pytest.raises(ValueError, match="none of one"):
        auc([], [1.0])
