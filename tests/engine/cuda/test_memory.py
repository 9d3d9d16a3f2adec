"""The memory plan: what is asked for is counted, what is left becomes KV blocks, what does not fit says so."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from app.engine.config import CudaConfig, EngineConfig, XlaConfig
from app.engine.cuda.memory import MemoryPlan, plan_memory
from app.engine.errors import OutOfDeviceMemory
from app.engine.models.memory_estimate import kv_block_bytes, rank_row_bytes
from app.engine.models.spec import ModelSpec
from app.engine.models.weight_names import LATENT_NORMS, LAYER_NORMS
from tests.engine.adapters.random_adapters import random_tensors, tiny_spec
from tests.engine.batch_invariance import latent_spec
from tests.engine.cuda.gpu import gpu_backend, gpu_config

GIB = 1 << 30


def _plan(*, device_bytes: int = 8 * GIB, free_bytes: int = 8 * GIB, **settings: Any) -> MemoryPlan:
    cuda = CudaConfig(**{key: settings.pop(key) for key in CudaConfig.model_fields if key in settings})
    config = EngineConfig(cuda=cuda, **settings)
    return plan_memory(tiny_spec(), config, device_bytes=device_bytes, free_bytes=free_bytes, element_bytes=2)


@pytest.mark.parametrize("spec", [tiny_spec(), latent_spec()], ids=lambda spec: spec.family)
def test_the_parts_are_counted_in_the_tensors_that_are_there(spec: ModelSpec) -> None:
    config = gpu_config(lora_pool_rows=40, num_kv_blocks=9)
    backend = gpu_backend(spec, random_tensors(spec), config)
    weights, tables, kv = backend._weights, backend._tables, backend._kv
    matrices = [weights.embedding, *(m for w in weights.layers for m in w.modules.values())]
    of_layers = [getattr(w, name) for w in weights.layers for name in (*LAYER_NORMS, *LATENT_NORMS)]
    norms = [weights.final_norm, *(norm for norm in of_layers if norm is not None)]
    assert backend.plan.weight_bytes == sum(t.nbytes for t in (*matrices, *norms))
    assert backend.plan.kv_bytes == sum(t.nbytes for t in (*kv.keys, *kv.values))
    assert backend.limits.lora_pool_rows == backend.plan.lora_pool_rows == 32  # whole multiples of 16
    assert backend.plan.rank_row_bytes == tables._singles.memory.nbytes
    backend.close()


def test_zero_blocks_are_as_many_as_fit() -> None:
    plan = _plan(num_kv_blocks=0, gpu_memory_utilization=0.5)
    assert plan.budget_bytes == 4 * GIB
    assert plan.num_kv_blocks > 1000
    assert 0 <= plan.budget_bytes - plan.total_bytes < plan.kv_block_bytes
    more = _plan(num_kv_blocks=0, gpu_memory_utilization=0.5, lora_pool_rows=16 * 100)
    rows = 1600 - 512
    lost = rows * rank_row_bytes(tiny_spec(), 2) / kv_block_bytes(tiny_spec(), 16, 2)
    assert plan.num_kv_blocks - more.num_kv_blocks == pytest.approx(lost, abs=1)
    assert _plan(num_kv_blocks=0, memory_bytes=2 * GIB).budget_bytes == 2 * GIB


def test_a_plan_prints_its_numbers() -> None:
    text = str(_plan(num_kv_blocks=7, lora_pool_rows=100))
    assert "96 rank rows" in text
    assert "7 KV blocks" in text
    assert "of 7.20 GiB" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_kv_blocks": 10**8}, r"do not fit: weights .* 100000000 KV blocks .* of 7.20 GiB; lower"),
        ({"lora_pool_rows": 10**8}, r"do not fit: .* rank rows .* GiB.*lower engine.num_kv_blocks"),
        ({"memory_bytes": 3 * GIB, "free_bytes": 2 * GIB}, r"budget is 3.00 GiB but 2.00 GiB of the device's 8.00 GiB"),
        ({"memory_bytes": GIB // 2, "num_kv_blocks": 0}, r"no memory is left for KV blocks of .*: weights"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OutOfDeviceMemory, match=message) as caught:
        _plan(**settings)
    assert re.search(r"engine\.\w+", str(caught.value))


def test_zero_blocks_are_for_cuda() -> None:
    with pytest.raises(ValidationError, match="num_kv_blocks is 0; at least 2"):
        EngineConfig(num_kv_blocks=0)
    with pytest.raises(ValidationError, match="num_kv_blocks is 0; at least 2"):
        EngineConfig(num_kv_blocks=0, xla=XlaConfig(platform="gpu"))
    with pytest.raises(ValidationError, match="num_kv_blocks is 1; at least 2"):
        EngineConfig(num_kv_blocks=1, cuda=CudaConfig())
