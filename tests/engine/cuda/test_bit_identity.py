"""Deterministic mode: the CPU engine's property, on the GPU engine.

Without a GPU the kernels are plain torch of fixed shapes: what is tested then is everything around them (graph
buckets and padding, staging, chunks, extras, sampling); with one, the kernels too.
"""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.config import CudaConfig
from tests.budgets import Budget
from tests.engine.company import disturbed
from tests.engine.cuda.gpu import ON_CUDA, gpu_backend

#: Seconds for each type, and batches in any case.
BUDGET_S, MIN_BATCHES = (60, 2500) if ON_CUDA else (4, 60)
#: A round is some hundred batches, and half of the rounds preempt nobody: after this many, nothing ever will.
MAX_BATCHES = 50_000
CUDA = CudaConfig(deterministic=True, memory_fraction=0.5, skip_precompile=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_is_answered_with_the_same_bits_alone_and_in_any_company(dtype: str) -> None:
    disturbances = np.zeros(4, np.int64)
    budget = Budget(BUDGET_S)
    while (
        budget.is_left() or disturbances[0] < MIN_BATCHES or (not disturbances.all() and disturbances[0] < MAX_BATCHES)
    ):
        disturbances += disturbed(
            gpu_backend, CUDA.model_copy(update={"dtype": dtype}), num_engines=3, kv_tokens=(138, 160, 200)
        )
    assert disturbances.all(), dict(zip(("batches", "preemptions", "evictions", "hits"), disturbances, strict=True))
