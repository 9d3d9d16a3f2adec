"""The table of operations: every form computes what plain NumPy does, for rows that are real, however few."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.engine.config import WeightStorage
from app.engine.errors import ConfigError
from app.engine.xla.forms import operations_of
from app.engine.xla.operations import Operations
from app.engine.xla.xla_operations import XlaOperations
from app.kernels.machine.team import Team
from tests.pairwise import pairwise
from tests.seeds import rng

Stack = tuple[np.ndarray, object]


@pytest.fixture(params=[("cpu", "float32"), ("cpu", "int8"), ("xla", "float32")], ids="-".join, scope="module")
def form(request: pytest.FixtureRequest) -> Iterator[tuple[Operations, WeightStorage]]:
    name, storage = request.param
    operations = operations_of(name, "cpu")
    yield operations, storage
    operations.close()


def stack_of(form: tuple[Operations, WeightStorage], count: int, columns: int, depth: int) -> Stack:
    """Weights [count, columns, depth] on grids of multiples of 1/8, which 8 bits hold exactly, and as the form's."""
    operations, storage = form
    weights = (rng().integers(-9, 10, (count, columns, depth)) / 8).astype(np.float32)
    with closing(Team(1)) as team:
        builder = operations.new_stack(weights.shape, storage, team)
        for layer, w in enumerate(weights):
            builder.store(layer, 0, w[: columns // 2 // 16 * 16])  # in two parts, as two targets come
            builder.store(layer, columns // 2 // 16 * 16, w[columns // 2 // 16 * 16 :])
    return weights, jax.tree.map(jnp.asarray, builder.stack)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 9])
def test_a_product_is_the_layers_own(form: tuple[Operations, WeightStorage], num_rows: int) -> None:
    operations = form[0]
    weights, stack = stack_of(form, 3, 48, 40)
    x = rng().normal(size=(9, 40)).astype(np.float32)
    with operations.step():
        for layer in range(3):
            found = np.asarray(jax.jit(operations.product)(x, stack, jnp.int32(layer), jnp.int32(num_rows)))
            np.testing.assert_allclose(found[:num_rows], x[:num_rows] @ weights[layer].T, rtol=1e-5, atol=1e-4)


def test_single_columns_are_the_stored_weights(form: tuple[Operations, WeightStorage]) -> None:
    weights, stack = stack_of(form, 2, 48, 40)
    ids = jnp.array([47, 0, 16, 15, 0])
    for layer in range(2):
        found = form[0].columns(stack, jnp.int32(layer), ids)
        np.testing.assert_allclose(found, weights[layer][np.asarray(ids)], rtol=1e-6, atol=1e-6)


@pairwise({"counts": [(0, 0, 0), (9, 0, 0), (0, 1, 8), (3, 2, 1), (0, 0, 5)], "first": [0, 2]}, strength=1)
def test_rows_meet_the_weights_of_their_own_group(
    form: tuple[Operations, WeightStorage], counts: tuple[int, ...], first: int
) -> None:
    operations = form[0]
    weights, stack = stack_of(form, 5, 32, 40)
    x = rng().normal(size=(9, 40)).astype(np.float32)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    with operations.step():
        found = np.asarray(jax.jit(operations.product_by_group)(x, stack, jnp.int32(first), starts))
    for group, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        expected = x[start:end] @ weights[first + group].T
        np.testing.assert_allclose(found[start:end], expected, rtol=1e-5, atol=1e-4)


@pairwise({"num_rows": [0, 1, 4, 7], "first": [0, 3]}, strength=1)
def test_every_head_meets_its_own_weights(form: tuple[Operations, WeightStorage], num_rows: int, first: int) -> None:
    operations = form[0]
    weights, stack = stack_of(form, 6, 32, 40)
    x = rng().normal(size=(7, 3, 40)).astype(np.float32)
    with operations.step():
        found = np.asarray(jax.jit(operations.product_by_head)(x, stack, jnp.int32(first), jnp.int32(num_rows)))
    assert found.shape == (7, 3, 32)
    expected = np.einsum("tnd,nwd->tnw", x, weights[first : first + 3])
    np.testing.assert_allclose(found[:num_rows], expected[:num_rows], rtol=1e-5, atol=1e-4)


def test_memory_has_room_for_a_head_of_any_size(form: tuple[Operations, WeightStorage]) -> None:
    operations = form[0]
    for head_dim in (8, 16, 20):
        keys, values = operations.memory_shapes((2, 3, 4), 16, head_dim)
        width = -(-head_dim // operations.column_multiple) * operations.column_multiple
        assert keys[:3] == values[:3] == (2, 3, 4)
        assert sorted(keys[3:]) == sorted(values[3:]) == sorted((16, width))
        assert operations.latent_shape((2, 3), 16, head_dim) == (2, 3, 1, 16, width)


def test_a_form_that_keeps_float32_says_so_before_anything_is_read() -> None:
    operations = XlaOperations()
    operations.check_storage("float32")
    operations.check_storage("auto")
    with pytest.raises(
        ConfigError, match=r"weight_storage is 'int8' but the form 'xla' keeps float32 weights; set auto"
    ):
        operations.check_storage("int8")
