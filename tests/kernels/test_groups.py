"""Rows times the weights of their own group, in XLA programs: equal to one product per row, in every form."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.kernels.machine.team import Team
from app.kernels.matmul.storing import empty_stack, store
from app.kernels.moe_lora import ffi, xla
from tests.kernels.cases import normal, relative_error
from tests.seeds import rng

DEPTH, WIDTH, GROUPS, FIRST = 40, 48, 6, 2


@pytest.fixture(scope="module")
def with_team() -> Iterator[Team]:
    team = Team(1)
    yield team
    team.close()


@pytest.mark.parametrize("counts", [(0,) * 6, (1, 0, 0, 0, 0, 0), (0, 3, 0, 21, 1, 9), (0, 0, 0, 0, 0, 41)], ids=str)
@pytest.mark.parametrize("form", ["xla", "cpu", "cpu in 8 bits"])
def test_every_row_has_the_weights_of_its_group(form: str, counts: tuple[int, ...], with_team: Team) -> None:
    generator, num_rows = rng(), 43
    weights = np.rint(normal(generator, FIRST + GROUPS, WIDTH, DEPTH) * 16) / 16
    weights[:, :, 0] = 8  # a grid of at most 256 values in each group of 32
    weights = np.clip(weights, -7.5, 8).astype(np.float32)
    x = normal(generator, num_rows, DEPTH)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    stack = empty_stack(len(weights), WIDTH, DEPTH, quantised="8" in form)
    for index, matrix in enumerate(weights):
        assert store(with_team, stack, index, 0, matrix)

    @jax.jit
    def multiply(x: jax.Array, starts: jax.Array, first: jax.Array) -> jax.Array:
        if form == "xla":
            return xla.multiply_groups(x, jnp.array(weights), first, starts)
        return ffi.multiply_groups(x, jax.tree.map(jnp.asarray, stack), first, starts)

    found = np.asarray(multiply(jnp.array(x), jnp.array(starts), jnp.int32(FIRST)))
    groups = np.repeat(np.arange(GROUPS), counts)
    expected = np.einsum("pk,pnk->pn", x[: len(groups)].astype(np.float64), weights[FIRST + groups])
    assert found.shape == (num_rows, WIDTH)
    if len(groups):
        assert relative_error(found[: len(groups)], expected) < 1e-5
