"""The property: a request's tokens and log-probabilities are the same bits alone and in any batch.

`batch_invariance.py` says which batches; zero differing bits are allowed, over at least `MIN_BATCHES` batches in all.
Its weights are such that `auto` takes 8 bits for all of them, so all ways to store weights and KV memory, and all
arithmetics, are tested.
"""

from __future__ import annotations

import numpy as np
import pytest

from app.engine.config import CpuConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.spec import ModelSpec
from tests.budgets import Budget
from tests.engine.batch_invariance import disturbed, gemma_spec, latent_spec, mixture_spec, sinks_spec

#: Seconds for each storage, and batches in any case.
BUDGET_S, MIN_BATCHES = 2, 1000
#: What `disturbed` counts.
KINDS = ("batches", "preemptions", "evictions", "hits", "right guesses", "wrong guesses")


@pytest.mark.parametrize(
    ("cpu", "spec"),
    [
        (CpuConfig(weight_dtype="float32"), None),
        (CpuConfig(), None),
        pytest.param(CpuConfig(compute="int8"), None, marks=pytest.mark.nightly),
        pytest.param(CpuConfig(compute="bfloat16"), None, marks=pytest.mark.nightly),
        pytest.param(CpuConfig(kv_cache_dtype="bfloat16"), None, marks=pytest.mark.nightly),
        (CpuConfig(weight_dtype="float32"), gemma_spec("gemma2")),
        (CpuConfig(weight_dtype="float32"), gemma_spec("gemma3_text")),
        (CpuConfig(), gemma_spec("gemma3_text")),
        (CpuConfig(weight_dtype="float32"), mixture_spec()),
        pytest.param(CpuConfig(), mixture_spec(), marks=pytest.mark.nightly),  # a minute of compilation
        pytest.param(CpuConfig(compute="int8"), mixture_spec(), marks=pytest.mark.nightly),
        pytest.param(CpuConfig(compute="bfloat16"), mixture_spec(), marks=pytest.mark.nightly),
        (CpuConfig(weight_dtype="float32"), latent_spec()),
        pytest.param(CpuConfig(compute="int8"), latent_spec(), marks=pytest.mark.nightly),
        pytest.param(CpuConfig(compute="bfloat16"), latent_spec(), marks=pytest.mark.nightly),
        pytest.param(CpuConfig(kv_cache_dtype="bfloat16"), latent_spec(), marks=pytest.mark.nightly),
        (CpuConfig(weight_dtype="float32"), sinks_spec()),
    ],
    ids=[
        "dense",
        "dense in 8 bits",
        "dense in integers",
        "dense in bfloat16",
        "dense with KV in bfloat16",
        "gemma2",
        "gemma3",
        "gemma3 in 8 bits",
        "mixture",
        "mixture in 8 bits",
        "mixture in integers",
        "mixture in bfloat16",
        "latents",
        "latents in integers",
        "latents in bfloat16",
        "latents with KV in bfloat16",
        "sinks",
    ],
)
def test_a_request_is_answered_with_the_same_bits_alone_and_in_any_batch(
    cpu: CpuConfig, spec: ModelSpec | None
) -> None:
    disturbances = np.zeros(len(KINDS), np.int64)
    budget = Budget(BUDGET_S)
    while (
        budget.is_left()
        or disturbances[0] < MIN_BATCHES
        or (not disturbances.all() and disturbances[0] < 10 * MIN_BATCHES)
    ):
        disturbances += disturbed(CpuBackend, cpu, spec=spec)
    # Everything that could disturb a request has happened.
    assert disturbances.all(), dict(zip(KINDS, disturbances, strict=True))
