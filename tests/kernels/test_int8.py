"""8-bit weights: the products of the expanded values to the bit, on the weights' own grid or a fine one."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul import cpu, int8, pack_weights
from tests.kernels.cases import normal
from tests.seeds import rng

Floats = NDArray[np.float32]


@jit
def _multiply(x, w, first, end, out, accumulate):  # type: ignore[no-untyped-def]
    int8.multiply_any_panels(x, w, first, end, out, accumulate, cpu.NO_FETCH)


@pytest.mark.parametrize("shape", [(16, 32), (35, 48), (100, 130), (64, 576), (1, 5)])
def test_products_equal_those_of_the_expanded_weights_to_the_bit(shape: tuple[int, int]) -> None:
    generator = rng()
    num_columns, depth = shape
    w = pack_weights.quantise(normal(generator, num_columns, depth))
    panels = pack_weights.dequantise(w)
    for num_rows in (*range(10), 13, 16, 17, 24, 65):
        x = normal(generator, num_rows, depth)
        for accumulate in (False, True):
            out = normal(generator, num_rows, len(panels) * 16)
            expected = out.copy()
            cut = int(generator.integers(len(panels) + 1))
            _multiply(x, w, 0, cut, out, accumulate)
            _multiply(x, w, cut, len(panels), out, accumulate)
            ThreadTeam(1).run(cpu.matmul, 1, x, panels, expected, accumulate)
            assert np.array_equal(out, expected)


def test_the_error_is_at_most_half_a_step_of_each_group() -> None:
    w = normal(rng(), 48, 100) * 3
    error = np.abs(pack_weights.dequantise(pack_weights.quantise(w)) - cpu.pack(w))
    for first in range(0, 100, int8.GROUP):
        group = cpu.pack(w)[:, first : first + int8.GROUP]
        step = (group.max(axis=1) - group.min(axis=1)) / 255
        assert (error[:, first : first + int8.GROUP] <= step[:, None] * 0.5001 + 1e-6).all()


def _on_a_grid(generator: np.random.Generator, kind: str, shape: tuple[int, int]) -> Floats:
    """Weights that came through one of GGUF's formats with groups of 32, padded columns included."""
    num_columns, depth = shape
    padded = normal(generator, num_columns, -(-depth // 32) * 32) * np.float32(0.05)
    type_of = gguf.GGMLQuantizationType[kind]
    return np.ascontiguousarray(gguf.dequantize(gguf.quantize(padded, type_of), type_of)[:, :depth], np.float32)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("shape", [(16, 256), (35, 100), (3, 33), (1, 1)])
def test_weights_on_a_grid_come_back_to_the_bit(kind: str, shape: tuple[int, int]) -> None:
    w = _on_a_grid(rng(), kind, shape)
    assert np.array_equal(pack_weights.dequantise(pack_weights.quantise(w)), cpu.pack(w))


def test_a_grid_is_found_from_any_of_its_levels() -> None:
    """Distances whose divisor only shows in the last of them, ends that are not the grid's, a grid far from zero.

    Offsets of 2**-9 and up: half precision then has no bits below those that float32 keeps of the largest weight,
    about 2**5, so that the weights are on their grid. Rounded ones lie beside it, and rightly count as changed.
    """
    generator = rng()
    for _ in range(300):
        num_steps = int(generator.integers(1, 256))
        levels = generator.integers(0, num_steps + 1, 32)
        if generator.integers(2):
            levels = levels // 6 * 6
            levels[-1] += 1
        scale = np.float16(generator.uniform(1e-3, 1e-1))
        offset = np.float16(generator.choice([-1, 1]) * generator.uniform(2**-9, 4))
        exact = (levels * np.float64(scale) + np.float64(offset))[None]
        w = exact.astype(np.float32)
        assert np.array_equal(w, exact)
        assert np.array_equal(pack_weights.dequantise(pack_weights.quantise(w)), cpu.pack(w)), (levels, scale, offset)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_weight_beside_its_grid_is_refused(num_threads: int) -> None:
    generator, team = rng(), ThreadTeam(num_threads)
    w = _on_a_grid(generator, "Q4_1", (70, 96))
    stack = pack_weights.empty_stack(3, 128, 96, quantised=True)
    assert isinstance(stack, int8.Int8Panels)
    assert pack_weights.store(team, stack, 1, 16, w, only_exact=True)
    kept = pack_weights.dequantise_stack(team, stack, [(1, 16, 16 + len(w))])
    assert np.array_equal(kept[1, 1:6], cpu.pack(w))
    assert pack_weights.store(team, kept, 1, 16, w)
    assert np.array_equal(kept[1, 1:6], cpu.pack(w))

    beside = w.copy()
    at = int(generator.integers(w.shape[0])), int(generator.integers(w.shape[1]))
    beside[at] = np.nextafter(w[at], np.float32(np.inf))
    for only_exact in (True, False):
        assert not pack_weights.store(team, stack, 1, 16, beside, only_exact=only_exact)
    beside[at] = np.nan
    assert not pack_weights.store(team, stack, 1, 16, beside, only_exact=True)
    team.close()


def test_constant_weights_are_exact() -> None:
    w = np.full((16, 40), -2.5, np.float32)
    assert np.array_equal(pack_weights.dequantise(pack_weights.quantise(w)), cpu.pack(w))
