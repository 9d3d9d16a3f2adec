"""LoRA deltas in JAX programs, in XLA and in Pallas: equal to the loop over rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from app.kernels.sgmv import pallas, reference, xla
from app.kernels.sgmv.xla import Segments
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.kernels.test_sgmv import CASES, DEPTH, PLACES, ROWS, WIDTH
from tests.pairwise import pairwise
from tests.seeds import rng

Floats = NDArray[np.float32]

STARTS = np.array([start for start, _ in PLACES], np.int32)
RANKS = np.array([rank for _, rank in PLACES], np.int32)
#: One shape for every case, as in a program: nothing below compiles twice.
TOKENS, SEGMENTS, LAYER = 112, 24, 1

FORMS = {
    "xla": jax.jit(xla.add_deltas),
    "pallas": jax.jit(functools.partial(pallas.add_deltas, interpret=True)),
}


def _rows(generator: np.random.Generator, *shape: int) -> Floats:
    """Rank rows [R, ...]: zero where an adapter's run has none, NaN where nobody's are."""
    rows = np.full((ROWS, *shape), np.nan, np.float32)
    for start, rank in PLACES[1:]:
        rows[start : start - (-rank // 8) * 8] = 0
        rows[start : start + rank] = normal(generator, rank, *shape)
    return rows


def _layers(rows: Floats) -> Floats:
    """Two layers, of which the other one holds nothing that may be read."""
    return np.stack([np.full_like(rows, np.nan), rows])


def _runs(name: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    counts, adapter_slots = [n for n, _ in CASES[name]], [s for _, s in CASES[name]]
    return np.cumsum([0, *counts]).astype(np.int32), np.array(adapter_slots, np.int32)


def _segments(name: str) -> Segments:
    lines, found = np.zeros((SEGMENTS, 3), np.int32), xla.segment_lines(*_runs(name))
    lines[: len(found)] = found
    widest = max((RANKS[adapter_slot] for _, adapter_slot in CASES[name]), default=0)
    return Segments(jnp.array(lines), jnp.int32(len(found)), jnp.int32(widest))


def _deltas(name: str, x: Floats, modules: list[tuple[Floats, Floats]]) -> Floats:
    """By the definition, modules side by side."""
    run_starts, adapter_slots = _runs(name)
    deltas = [
        reference.lora_delta(
            x[: run_starts[-1]], np.nan_to_num(a), np.nan_to_num(b), run_starts, adapter_slots,
            STARTS.astype(np.int64), RANKS,
        )
        for a, b in modules
    ]  # fmt: skip
    return np.concatenate(deltas, axis=1)


@pytest.mark.parametrize("form", FORMS)
@pairwise({"num_modules": [1, 2, 3], "name": CASES}, strength=1)
def test_deltas_of_every_form_are_the_definitions_and_base_rows_untouched(
    name: str, num_modules: int, form: str
) -> None:
    generator = rng()
    modules = [(_rows(generator, DEPTH), _rows(generator, WIDTH - 16 * n)) for n in range(num_modules)]
    run_starts, adapter_slots = _runs(name)
    count = int(run_starts[-1])
    x, y = normal(generator, TOKENS, DEPTH), normal(generator, TOKENS, sum(b.shape[1] for _, b in modules))
    x[count:] = np.nan  # padding
    a, b = ([_layers(module[part]) for module in modules] for part in (0, 1))
    ranks = np.broadcast_to(RANKS[:, None], (2, len(RANKS), num_modules)).copy()
    out = np.asarray(FORMS[form](x, y, a, b, jnp.int32(LAYER), _segments(name), STARTS, ranks))
    assert relative_error(out[:count], y[:count] + _deltas(name, x, modules)) < TOLERANCE["float32"]
    of_base = np.repeat(adapter_slots == 0, np.diff(run_starts))
    assert np.array_equal(out[:count][of_base], y[:count][of_base])
    assert np.array_equal(out[count:], y[count:])


@pytest.mark.parametrize("form", FORMS)
def test_modules_that_an_adapter_leaves_alone_are_left_alone(form: str) -> None:
    generator, name = rng(), "a different adapter each"
    modules = [(_rows(generator, DEPTH), _rows(generator, WIDTH)) for _ in range(2)]
    x, y = normal(generator, TOKENS, DEPTH), normal(generator, TOKENS, 2 * WIDTH)
    ranks = np.zeros((2, len(RANKS), 2), np.int32)
    ranks[LAYER, :, 1] = RANKS
    given = [(np.zeros_like(modules[0][0]), np.zeros_like(modules[0][1])), modules[1]]
    a, b = ([_layers(module[part]) for module in given] for part in (0, 1))
    out = np.asarray(FORMS[form](x, y, a, b, jnp.int32(LAYER), _segments(name), STARTS, ranks))
    assert np.array_equal(out[:, :WIDTH], y[:, :WIDTH])
    count = len(CASES[name])
    expected = y[:count, WIDTH:] + _deltas(name, x, modules[1:])
    assert relative_error(out[:count, WIDTH:], expected) < TOLERANCE["float32"]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_without_rank_rows_nothing_is_added(form: Callable[..., jax.Array]) -> None:
    x, y = normal(rng(), 4, DEPTH), normal(rng(), 4, WIDTH)
    a, b = np.zeros((2, 0, DEPTH), np.float32), np.zeros((2, 0, WIDTH), np.float32)
    found = form(x, y, [a], [b], jnp.int32(1), _segments("only the base"), STARTS, np.zeros((2, 7, 1), np.int32))
    assert np.array_equal(found, y)


def test_an_adapter_without_rank_rows_changes_nothing() -> None:
    """It has segments all the same: the step's largest rank is 0."""
    x, y = normal(rng(), TOKENS, DEPTH), normal(rng(), TOKENS, WIDTH)
    a, b = _layers(_rows(rng(), DEPTH)), _layers(_rows(rng(), WIDTH))
    segments = _segments("a different adapter each")._replace(widest=jnp.int32(0))
    for form in FORMS.values():
        found = form(x, y, [a], [b], jnp.int32(LAYER), segments, STARTS, np.zeros((2, len(RANKS), 1), np.int32))
        assert np.array_equal(found, y)


def test_pallas_lowers_for_tpu() -> None:
    """Lowered, not run: no TPU here. Shapes of the demo model's q projection."""
    segments = Segments(jnp.zeros((8, 3), jnp.int32), jnp.int32(1), jnp.int32(8))
    slots = jnp.zeros(4, jnp.int32)
    x, rows = jnp.zeros((64, 640)), jnp.zeros((2, 64, 640))
    lowered = jax.jit(functools.partial(pallas.add_deltas, interpret=False))
    exported = jax.export.export(lowered, platforms=["tpu"])(
        x, x, [rows], [rows], jnp.int32(1), segments, slots, jnp.zeros((2, 4, 1), jnp.int32)
    )
    assert exported.mlir_module().count("tpu_custom_call") == 1
