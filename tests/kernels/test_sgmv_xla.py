"""LoRA deltas in JAX and in Pallas: equal to the loop, base rows untouched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.sgmv import pallas, reference, xla
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.kernels.test_sgmv import CASES, DEPTH, PLACES, ROWS, WIDTH
from tests.seeds import rng

ROW_STARTS = np.array([p[0] for p in PLACES], np.int32)
RANKS = np.array([p[1] for p in PLACES], np.int32)
#: One shape for every case, as in a program: nothing below compiles twice.
TOKENS, SEGMENTS = 112, 24


def _case(name: str) -> tuple[NDArray[np.float32], ...]:
    """x padded to TOKENS, a and b with zero rows where an adapter's run has none, NaN where nobody's."""
    generator = rng()
    x = np.zeros((TOKENS, DEPTH), np.float32)
    count = sum(n for n, _ in CASES[name])
    x[:count] = normal(generator, count, DEPTH)
    a, b = np.full((ROWS, DEPTH), np.nan, np.float32), np.full((ROWS, WIDTH), np.nan, np.float32)
    for start, rank in PLACES[1:]:
        end = start + -(-rank // 8) * 8
        a[start:end], b[start:end] = 0, 0
        a[start : start + rank], b[start : start + rank] = (
            normal(generator, rank, DEPTH),
            normal(generator, rank, WIDTH),
        )
    return x, a, b


def _runs(name: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    counts, adapter_slots = [n for n, _ in CASES[name]], [s for _, s in CASES[name]]
    return np.cumsum([0, *counts]).astype(np.int32), np.array(adapter_slots, np.int32)


def _segments(name: str) -> xla.Segments:
    out = np.zeros((4, SEGMENTS), np.int32)
    count = xla.segment_arrays(*_runs(name), ROW_STARTS, RANKS, out)
    return xla.Segments(jnp.int32(count), *(jnp.array(row) for row in out))


_add_deltas = jax.jit(xla.add_deltas, static_argnames="out_sizes")
_lora_delta = jax.jit(pallas.lora_delta, static_argnames=("max_chunks", "interpret"))


@pytest.mark.parametrize("name", CASES)
def test_all_forms_equal_the_loop_over_rows(name: str) -> None:
    x, a, b = _case(name)
    run_starts, adapter_slots = _runs(name)
    segments = _segments(name)
    count = int(run_starts[-1])
    places = (np.nan_to_num(a), np.nan_to_num(b), run_starts, adapter_slots, ROW_STARTS.astype(np.int64), RANKS)
    delta = reference.lora_delta(x[:count], *places)
    of_base = np.repeat(adapter_slots, np.diff(run_starts)) == 0
    y = normal(rng(), TOKENS, WIDTH)
    # Two modules side by side, in the second of two layers; the other layer is poison.
    a_both = np.stack([np.full((ROWS, 2 * DEPTH), np.nan, np.float32), np.concatenate([a, a], axis=1)])
    b_both = np.stack([np.full((ROWS, WIDTH), np.nan, np.float32), b])
    out = np.asarray(_add_deltas(x, y, a_both, b_both, jnp.int32(1), segments, out_sizes=(16, WIDTH - 16)))
    assert relative_error(out[:count], y[:count] + delta) < TOLERANCE["float32"]
    assert np.array_equal(out[:count][of_base], y[:count][of_base])
    assert np.array_equal(out[count:], y[count:])
    pallas = np.asarray(_lora_delta(x, a, b, segments, max_chunks=16, interpret=True))
    assert relative_error(pallas[:count], delta) < TOLERANCE["float32"]
    assert not pallas[:count][of_base].any()
    assert not pallas[count:].any()


def test_pallas_lowers_for_tpu() -> None:
    """Lowered, not run: no TPU here. Shapes of the demo model's q projection."""
    segments = xla.Segments(jnp.int32(1), *(jnp.zeros(8, jnp.int32) for _ in range(4)))
    shapes = (jnp.zeros((64, 640)), jnp.zeros((64, 640)), jnp.zeros((64, 640)))
    exported = jax.export.export(_lora_delta, platforms=["tpu"])(*shapes, segments, max_chunks=2, interpret=False)
    assert exported.mlir_module().count("tpu_custom_call") == 2
