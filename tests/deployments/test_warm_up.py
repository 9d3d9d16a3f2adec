"""A new replica holds the hottest adapters that fit, and evicts the coldest of them first."""

from __future__ import annotations

import pytest

from app.deployments.warm_up import hottest_that_fit, warm_adapters
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from tests.fakes import FakeBackend, fake_adapter

LIMITS = BackendLimits(num_kv_blocks=32, block_size=8, adapter_rank_rows=32, rank_alignment=8, max_adapter_slots=16)


def residents(engine: Engine) -> set[str]:
    return {resident.digest for resident in engine.stats().residents}


def test_the_hot_set_is_resident_and_leaves_from_its_cold_end() -> None:
    engine = Engine(FakeBackend(LIMITS), EngineConfig())
    hot = [fake_adapter(name, 8) for name in "abcd"]
    warm_adapters(engine, hot)
    assert residents(engine) == {adapter.card.digest for adapter in hot}
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    for coldest in reversed(range(1, 4)):
        newcomer = fake_adapter(f"new{coldest}", 8)
        warm_adapters(engine, [newcomer])
        assert {adapter.card.digest for adapter in hot[:coldest]} <= residents(engine)
        assert hot[coldest].card.digest not in residents(engine)


@pytest.mark.parametrize(
    ("max_ranks", "num_rows", "count"),
    [([], 64, 0), ([8, 8, 8], 16, 2), ([1, 1], 16, 2), ([9, 8], 16, 1), ([64, 8], 63, 0), ([16, 48, 8], 128, 3)],
)
def test_the_hottest_come_first(max_ranks: list[int], num_rows: int, count: int) -> None:
    assert hottest_that_fit(max_ranks, num_rows) == count
