"""Adapters whose values are bfloat16's take half the bytes of their rows, and give the torch engine's bits."""

from __future__ import annotations

import jax
import numpy as np
import torch

from app.engine.cpu.backend import CpuBackend
from app.engine.xla.backend import JaxBackend
from app.engine.xla.sharding import make_mesh
from tests.engine.adapters.making import random_adapter, random_tensors, tiny_spec
from tests.engine.cpu.test_narrow_rows import with_a_fine_zero
from tests.engine.served import CONFIG, served_logits
from tests.engine.xla.test_adapter_extras import JAX_CONFIG


def test_narrow_and_wide_rows_give_the_torch_engines_bits() -> None:
    spec = tiny_spec()
    tensors = random_tensors(spec)
    backend = JaxBackend(spec, tensors, JAX_CONFIG, make_mesh(jax.devices("cpu"), 1))
    torch_backend = CpuBackend(spec, tensors, CONFIG)
    in_bf16 = backend._adapters._in_bf16
    targets = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    narrow = [random_adapter(spec, rank, targets, dtype="BF16", size=0.3) for rank in (1, 8, 13, 32)]
    others = [random_adapter(spec, rank, size=0.3) for rank in (3, 16)]
    tokens = torch.randint(3, spec.vocab_size, (3, 9))
    for adapters, expected in ((narrow, True), (map(with_a_fine_zero, narrow), False), (narrow, True)):
        batch = [None, *adapters, *others]
        served = served_logits(backend, batch, tokens)
        assert in_bf16[2:8].tolist() == [expected] * 4 + [False] * 2
        np.testing.assert_array_equal(served, served_logits(torch_backend, batch, tokens))
        assert all(np.any(logits != served[0]) for logits in served[1:])
    for adapter, logits in zip(narrow, served[1:], strict=False):
        np.testing.assert_array_equal(served_logits(backend, [adapter], tokens)[0], logits)
    torch_backend.close()
    backend.close()
