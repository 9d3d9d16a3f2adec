"""Adapters whose values are bfloat16's take half the bytes per step, and give the bits of float32 rows."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import numpy as np
import pytest
import torch

from app.engine.adapters.adapter import BFLOAT16, LoraAdapter, LoraKey, LoraPair, to_float32
from app.engine.cpu.backend import CpuBackend
from app.engine.models.linear_modules import target_shape
from tests.engine.adapters.random_adapters import random_adapter, random_tensors, tiny_spec
from tests.engine.served import CONFIG, served_logits


def with_a_fine_zero(adapter: LoraAdapter) -> LoraAdapter:
    """The same adapter with one more module, whose delta is zero and whose A needs more bits than bfloat16 has."""
    d_in, d_out = target_shape(tiny_spec(), 0, "v_proj")
    pair = LoraPair(np.full((8, d_in), 0.1, np.float32), np.zeros((8, d_out), np.float32))
    weights = MappingProxyType({**adapter.weights, LoraKey(0, "v_proj"): pair})
    return dataclasses.replace(adapter, weights=weights)


def in_float32(adapter: LoraAdapter) -> LoraAdapter:
    pairs = {key: LoraPair(to_float32(a), to_float32(b)) for key, (a, b) in adapter.weights.items()}
    return dataclasses.replace(adapter, weights=pairs)


def test_narrow_and_wide_rows_give_the_same_bits() -> None:
    spec = tiny_spec()
    backend = CpuBackend(spec, random_tensors(spec), CONFIG)
    in_bf16 = backend._rows.in_bf16
    targets = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    narrow = [random_adapter(spec, rank, targets, dtype="BF16", size=0.3) for rank in (1, 8, 13, 32)]
    others = [random_adapter(spec, rank, size=0.3) for rank in (3, 16)]
    tokens = torch.randint(3, spec.vocab_size, (3, 9))
    mixed = served_logits(backend, [None, *narrow, *others], tokens)
    assert in_bf16[2:8].tolist() == [True] * 4 + [False] * 2
    wide = served_logits(backend, [None, *map(with_a_fine_zero, narrow), *others], tokens)
    assert not in_bf16[2:8].any()
    np.testing.assert_array_equal(mixed, wide)
    assert all(np.any(logits != mixed[0]) for logits in mixed[1:])
    for adapter, logits in zip(narrow, mixed[1:], strict=False):
        np.testing.assert_array_equal(served_logits(backend, [adapter], tokens)[0], logits)
    backend.close()


@pytest.mark.parametrize("ranks", [(1, 8, 13, 32), (512, 3)])
def test_adapters_in_bfloat16_give_the_bits_of_the_same_in_float32(ranks: tuple[int, ...]) -> None:
    spec = tiny_spec()
    config = CONFIG.model_copy(update={"lora_pool_rows": 1024})
    backend = CpuBackend(spec, random_tensors(spec), config)
    tokens = torch.randint(3, spec.vocab_size, (3, 9))
    adapters = [random_adapter(spec, rank, dtype="BF16", saved_in="BF16", alpha=2 * rank) for rank in ranks]
    assert all(pair.a.dtype == pair.b.dtype == BFLOAT16 for a in adapters for pair in a.weights.values())
    partly = random_adapter(spec, 8, alpha=5, dtype="BF16", saved_in="BF16")
    assert {(pair.a.dtype, pair.b.dtype) for pair in partly.weights.values()} == {(BFLOAT16, np.dtype(np.float32))}
    adapters.append(partly)
    narrow = served_logits(backend, adapters, tokens)
    assert backend._rows.in_bf16[1 : 1 + len(adapters)].tolist() == [True] * len(ranks) + [False]
    np.testing.assert_array_equal(narrow, served_logits(backend, [*map(in_float32, adapters)], tokens))
    assert len({logits.tobytes() for logits in narrow}) == len(adapters)
    backend.close()


@pytest.mark.parametrize(("dtype", "alpha", "expected"), [("BF16", 4, True), ("BF16", 5, False), ("F32", 4, False)])
def test_rows_are_narrow_if_every_value_fits_with_its_scale(dtype: str, alpha: float, expected: bool) -> None:
    """Rank 8: a scale of 1/2 keeps bfloat16's bits, one of 5/8 does not."""
    spec = tiny_spec()
    backend = CpuBackend(spec, random_tensors(spec), CONFIG)
    for _ in range(2):
        backend.write_adapter(1, 8, random_adapter(spec, 8, alpha=alpha, dtype=dtype))
        assert backend._rows.in_bf16[1] == expected
        backend.write_adapter(1, 8, random_adapter(spec, 8, dtype="F32"))
        assert not backend._rows.in_bf16[1]
    backend.close()
