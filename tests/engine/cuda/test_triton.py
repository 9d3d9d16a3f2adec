"""The GPU engine with Triton's kernels: the logits of plain torch. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.random_adapters import random_adapter, random_tensors, tiny_spec
from tests.engine.cuda.gpu import gpu_backend, gpu_config
from tests.seeds import rng


# What padding rows hold is nobody's, and may overflow.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_both_forms_of_the_kernels_give_the_same_logits(batch_invariant: bool) -> None:
    spec = tiny_spec(num_layers=1)
    tensors = random_tensors(spec)
    adapters = [random_adapter(spec, rank) for rank in (5, 24)]
    prompts = rng().integers(3, 60, (3, 9))
    logits = []
    for form in ("torch", "triton"):
        backend = gpu_backend(spec, tensors, gpu_config(lora_pool_rows=64, batch_invariant=batch_invariant), form)
        for slot, adapter in enumerate(adapters, 1):
            backend.write_adapter(slot, 32 * (slot - 1), adapter)
        for start, end in ((0, 8), (8, 9)):
            pieces = [Piece(p[start:end], start, np.array([3 * i + 1]), i) for i, p in enumerate(prompts)]
            backend.forward(forward_batch(pieces, 16))
            logits.append(backend.logits(3).copy())
        backend.close()
    np.testing.assert_allclose(logits[2], logits[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[3], logits[1], rtol=0, atol=1e-4)
