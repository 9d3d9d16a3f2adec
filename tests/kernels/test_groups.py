"""Rows times the weights of their own group, in XLA programs: equal to one product per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.kernels.moe_lora.xla import multiply_groups
from tests.kernels.cases import normal, relative_error
from tests.seeds import rng

DEPTH, WIDTH, GROUPS, FIRST = 40, 48, 6, 2


@pytest.mark.parametrize("counts", [(0,) * 6, (1, 0, 0, 0, 0, 0), (0, 3, 0, 21, 1, 9), (0, 0, 0, 0, 0, 41)], ids=str)
def test_every_row_has_the_weights_of_its_group(counts: tuple[int, ...]) -> None:
    generator, num_rows = rng(), 43
    weights = normal(generator, FIRST + GROUPS, WIDTH, DEPTH)
    x = normal(generator, num_rows, DEPTH)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    found = np.asarray(jax.jit(multiply_groups)(x, jnp.array(weights), jnp.int32(FIRST), starts))
    groups = np.repeat(np.arange(GROUPS), counts)
    expected = np.einsum("pk,pnk->pn", x[: len(groups)].astype(np.float64), weights[FIRST + groups])
    assert found.shape == (num_rows, WIDTH)
    if len(groups):
        assert relative_error(found[: len(groups)], expected) < 1e-5
