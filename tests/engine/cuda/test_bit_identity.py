"""Deterministic mode: the CPU engine's property, on the GPU engine.

Without a GPU the kernels are plain torch in one fixed order of sums: what is tested then is everything around them
(graph buckets and padding, staging, chunks, extras, sampling); with one, the kernels too. That the plain form rests on
no library's order of sums is tested by itself, so that what passes on one processor passes on every other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.config import CudaConfig, EngineConfig
from app.engine.cuda.backend import CudaBackend
from app.engine.models.spec import ModelSpec
from tests.budgets import Budget
from tests.engine.batch_invariance import disturbed, mixture_spec
from tests.engine.cuda.exact_operations import ExactOperations
from tests.engine.cuda.gpu import ON_CUDA, gpu_backend

#: Seconds for each type, and batches in any case.
BUDGET_S, MIN_BATCHES = (60, 2500) if ON_CUDA else (4, 60)
#: A round is some hundred batches, and half of the rounds preempt nobody: after this many, nothing ever will.
MAX_BATCHES = 50_000
CUDA = CudaConfig(batch_invariant=True, gpu_memory_utilization=0.5, skip_precompile=True)
KV_TOKENS = (160, 176, 200)
#: Dense, and with a GPU experts beside a shared one: the plain form takes minutes for these, so `test_mixtures` asks it
#: for a few sequences.
SPECS = {"dense": None, "mixture": mixture_spec()} if ON_CUDA else {"dense": None}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_a_request_is_answered_with_the_same_bits_alone_and_in_any_batch(dtype: str, kind: str) -> None:
    kinds = ("batches", "preemptions", "evictions", "hits")
    disturbances = np.zeros(len(kinds), np.int64)
    budget = Budget(BUDGET_S)
    while (
        budget.is_left() or disturbances[0] < MIN_BATCHES or (not disturbances.all() and disturbances[0] < MAX_BATCHES)
    ):
        disturbances += disturbed(
            gpu_backend,
            CUDA.model_copy(update={"dtype": dtype}),
            spec=SPECS[kind],
            num_engines=3,
            kv_tokens=KV_TOKENS,
        )[: len(kinds)]  # it verifies no guesses
    assert disturbances.all(), dict(zip(kinds, disturbances, strict=True))


def _inside(mode: ExactOperations, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with mode:
            return method(*arguments)

    return call


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_without_a_gpu_no_order_of_sums_is_a_librarys(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, draws and writes of a round of the fuzz, on the CPU: torch is asked for exact operations only."""
    mode = ExactOperations()

    def watched(spec: ModelSpec, tensors: Iterator[tuple[str, np.ndarray]], config: EngineConfig) -> CudaBackend:
        backend = gpu_backend(spec, tensors, config, "torch")
        for name in ("forward", "write_adapter"):
            monkeypatch.setattr(backend, name, _inside(mode, getattr(backend, name)))
        return backend

    disturbed(watched, CUDA.model_copy(update={"dtype": dtype}), num_engines=1, kv_tokens=KV_TOKENS)
    assert mode.counts["mul"] > 10_000, "the mode saw the products"


@pytest.mark.parametrize(
    "asked",
    [
        lambda x: x @ x,
        lambda x: torch.nn.functional.linear(x, x),
        lambda x: torch.einsum("ik,kj->ij", x, x),
        torch.sum,
        torch.exp,
        torch.sqrt,
        lambda x: x.mean(-1),
        lambda x: x.softmax(-1),
        lambda x: torch.add(x, x, alpha=2),
        lambda x: torch.addcmul(x, x, x),
    ],
)
def test_what_a_library_may_compute_in_its_own_order_is_found(asked: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(AssertionError), ExactOperations():
        asked(torch.ones(3, 3))
