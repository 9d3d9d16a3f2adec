"""What is saved in bfloat16 is served in bfloat16 where that loses nothing, and gives the numbers of float32 always."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from app.engine.adapters.adapter import BFLOAT16, LoraKey, LoraPair
from app.engine.adapters.adapter_builder import build_adapter
from app.engine.adapters.raw_adapter import RawAdapter, RawModule, RawTensor
from app.engine.adapters.sandbox.packing import pack_adapter, unpack_adapter
from app.engine.errors import AdapterFormatError
from tests.engine.adapters.random_adapters import random_adapter, tiny_spec

SPEC = tiny_spec()
FINITE = np.array([bits for bits in range(1 << 16) if bits & 0x7F80 != 0x7F80], np.uint16)
NORMAL = FINITE[(FINITE & 0x7FFF >= 0x0080) | (FINITE & 0x7FFF == 0)]
RANK = 4


def built(bits: np.ndarray, alpha: float) -> LoraPair:
    """q_proj of a module whose A and B have these bits, repeated."""
    a, b = (np.resize(bits, shape) for shape in ((RANK, 24), (32, RANK)))
    halves = [RawTensor("BF16", half.shape, memoryview(half.tobytes())) for half in (a, b)]
    module = RawModule("model.layers.0.self_attn.q_proj", *halves, alpha=alpha, use_rslora=False)
    return build_adapter(RawAdapter((module,)), SPEC).weights[LoraKey(0, "q_proj")]


def expected_b(bits: np.ndarray, alpha: float) -> np.ndarray:
    """In float64, which holds every product of a bfloat16 and a power of two, and then rounded to float32."""
    values = np.resize(bits, (32, RANK)).view(ml_dtypes.bfloat16).astype(np.float64)
    with np.errstate(over="ignore"):
        return (values * np.float64(np.float32(alpha / RANK))).astype(np.float32).T


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.5, 2.0**-20, 2.0**30, 2.0**-126, 2.0**-140, 3.0, 0.1, 0.0, -1.0, -2.0])
def test_every_bfloat16_times_a_scale_is_what_float32_gives(scale: float) -> None:
    """All finite values, 128 at a time; whichever type the products are in, they are those of float32."""
    types = set()
    for bits in np.array_split(FINITE, len(FINITE) // 128):
        wanted = expected_b(bits, scale * RANK)
        if not np.isfinite(wanted).all():
            with pytest.raises(AdapterFormatError, match="leaves float32"):
                built(bits, scale * RANK)
            continue
        pair = built(bits, scale * RANK)
        assert pair.a.dtype == BFLOAT16
        np.testing.assert_array_equal(pair.a.view(np.uint16), np.resize(bits, (RANK, 24)))
        np.testing.assert_array_equal(pair.b.astype(np.float32).view(np.uint32), wanted.view(np.uint32))
        types.add(pair.b.dtype)
    assert (BFLOAT16 in types) == (np.frexp(scale)[0] == 0.5)


@pytest.mark.parametrize("scale", [1.0, 0.25, 4.0])
def test_common_scales_keep_two_bytes(scale: float) -> None:
    common = NORMAL[((NORMAL & 0x7FFF) > 0x3000) & ((NORMAL & 0x7FFF) < 0x4200)]
    assert built(np.append(common, [0x0000, 0x8000]).astype(np.uint16), scale * RANK).b.dtype == BFLOAT16


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_file_may_put_its_values_anywhere(offset: int) -> None:
    values = NORMAL[:100]
    data = memoryview(bytes(offset) + values.tobytes())[offset:]
    read = RawTensor("BF16", (20, 5), data).as_saved()
    assert read.flags.aligned
    np.testing.assert_array_equal(read.view(np.uint16).reshape(-1), values)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC1, 0xFFFF])
def test_a_value_that_is_no_number_is_named(bits: int) -> None:
    values = np.full(RANK * 24, 0x3F80, np.uint16)
    values[5] = bits
    with pytest.raises(AdapterFormatError, match=r"q_proj: lora_A\[0, 5\] is (-?inf|nan)"):
        built(values, RANK)


def test_host_memory_counts_and_holds_two_bytes() -> None:
    adapter = random_adapter(SPEC, 8, dtype="BF16", saved_in="BF16")
    num_values = sum(array.size for pair in adapter.weights.values() for array in pair)
    assert adapter.card.size_bytes == 2 * num_values
    packed = pack_adapter(adapter)
    assert packed.arrays[0].nbytes < 2 * num_values + 64 * 2 * len(adapter.weights)
    restored = unpack_adapter(*packed)
    for key, pair in restored.weights.items():
        assert pair.a.dtype == pair.b.dtype == BFLOAT16
        for half, other in zip(pair, adapter.weights[key], strict=True):
            assert np.shares_memory(half, packed.arrays[0])
            np.testing.assert_array_equal(half.view(np.uint16), other.view(np.uint16))
