"""Packed adapters: one array, views of it, the same weights."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from app.engine.adapters.adapter_builder import build_adapter
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.raw_adapter import RawAdapter, RawModule
from app.engine.adapters.sandbox.packing import pack_adapter, unpack_adapter
from tests import seeds
from tests.engine.adapters.random_adapters import peft_beyond, random_adapter, stored_tensor, tiny_spec, write_peft

SPEC = tiny_spec()


def test_unpacking_restores_every_weight_as_a_view() -> None:
    adapter = random_adapter(SPEC, 5)
    header, arrays = pack_adapter(adapter)
    (flat,) = arrays
    flat.setflags(write=False)  # as Ray's object store hands it out
    header = pickle.loads(pickle.dumps(header))
    restored = unpack_adapter(header, arrays)
    assert restored.card == adapter.card
    assert list(restored.weights) == list(adapter.weights)
    for key, pair in restored.weights.items():
        for got, expected in zip(pair, adapter.weights[key], strict=True):
            np.testing.assert_array_equal(got, expected)
            assert np.shares_memory(got, flat)
            assert (got.ctypes.data - flat.ctypes.data) % 64 == 0
            assert got.flags.c_contiguous
            assert not got.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                got[0, 0] = 1


@pytest.mark.parametrize("features", [("lora_bias", "saved", "rows"), ("dora",), ("embedding",)])
def test_what_goes_beyond_plain_lora_is_packed_too(tmp_path: Path, features: tuple[str, ...]) -> None:
    adapter = read_adapter(
        write_peft(tmp_path, *peft_beyond(SPEC, features=features)), SPEC, supported_features=FEATURES
    )
    assert len(adapter.features) == len(features)
    header, arrays = pack_adapter(adapter)
    restored = unpack_adapter(pickle.loads(pickle.dumps(header)), arrays)
    assert restored.card == adapter.card
    assert restored.card.size_bytes <= arrays[0].nbytes
    for field in ("weights", "magnitudes", "delta_biases", "outer", "replaced", "token_rows"):
        before, after = getattr(adapter, field), getattr(restored, field)
        assert list(before) == list(after)
        for key, values in before.items():
            parts = zip(values, after[key], strict=True) if isinstance(values, tuple) else [(values, after[key])]
            for one, other in parts:
                np.testing.assert_array_equal(one, other)
                assert not isinstance(other, np.ndarray) or np.shares_memory(other, arrays[0])


def test_a_shared_matrix_is_stored_once() -> None:
    rng = seeds.rng()
    a, b = stored_tensor(rng.normal(size=(4, 24))), stored_tensor(rng.normal(size=(80, 4)))
    fused = RawModule("model.layers.1.mlp.gate_up_proj", a, b, alpha=4.0, use_rslora=False)
    adapter = build_adapter(RawAdapter((fused,)), SPEC)
    header, (flat,) = pack_adapter(adapter)
    assert flat.nbytes == adapter.card.size_bytes == 4 * (4 * 24 + 80 * 4)
    gate, up = unpack_adapter(header, [flat]).weights.values()
    assert gate.a is up.a
    assert not np.shares_memory(gate.b, up.b)


def test_a_packed_adapter_pickles_without_copying_its_weights() -> None:
    """Protocol 5 hands the array out of band, which is what lets Ray map it instead of copying."""
    header, arrays = pack_adapter(random_adapter(SPEC, 8))
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps((header, arrays), protocol=5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers] == [arrays[0].nbytes]
    assert len(stream) < 2000
    _, (mapped,) = pickle.loads(stream, buffers=buffers)
    assert np.shares_memory(mapped, arrays[0])
