"""Whatever settings load, warming up works and leaves the pools as they were."""

from __future__ import annotations

import pytest

from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.errors import EngineFailure
from app.engine.warm_up import warm_up
from tests.fakes import FakeBackend

LIMITS = BackendLimits(num_kv_blocks=32, block_size=8, lora_pool_rows=32, rank_alignment=8, max_loras=16)


def test_an_engine_that_fails_while_it_warms_is_not_ready() -> None:
    backend = FakeBackend(LIMITS)
    backend.fail_at = 0
    with pytest.raises(EngineFailure, match="on fire"):
        warm_up(Engine(backend, EngineConfig()))


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({}, {}),
        ({"lora_pool_rows": 0}, {}),
        ({"lora_pool_rows": 4}, {}),
        ({"max_loras": 1}, {}),
        ({"num_kv_blocks": 4}, {}),
        ({}, {"max_queued_requests": 1}),
        ({}, {"max_model_len": 12}),
        ({}, {"max_model_len": 2}),
    ],
)
def test_any_settings_that_load_warm_up(changes: dict[str, int], config: dict[str, int]) -> None:
    limits = LIMITS.__class__(**{name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__} | changes)
    engine = Engine(FakeBackend(limits), EngineConfig.model_validate(config))
    warm_up(engine)
    stats = engine.stats()
    assert stats.residents == ()
    assert stats.num_running == stats.num_waiting == 0
    assert (stats.num_tokens_generated > 0) == (config.get("max_model_len") != 2)
    engine.check()
