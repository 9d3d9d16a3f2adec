"""The plain-torch kernels that stand in for a GPU's: a row has the same bits alone and among any others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from app.kernels.activation.torch import gated
from app.kernels.matmul.torch import linear
from tests.kernels.cases import normal, rng


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With one thread nothing is cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [37, 72])
def test_an_activation_does_not_depend_on_where_a_threads_part_ends(activation: str, width: int) -> None:
    """More elements than torch gives one thread, and an odd number of rows: two threads meet inside of one."""
    for _ in range(40):
        gate_up = torch.from_numpy(normal(rng(), 1201, 2 * width) * 3)
        together, alone = torch.empty(1201, width), torch.empty(1201, width)
        gated(gate_up, together, activation)
        for row in range(590, 612):  # the threads meet in row 600
            gated(gate_up[row : row + 1], alone[row : row + 1], activation)
        np.testing.assert_array_equal(alone[590:612].numpy(), together[590:612].numpy())


def test_a_product_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = torch.from_numpy(normal(rng(), 43, 40)), torch.from_numpy(normal(rng(), 96, 40))
    together, alone = torch.empty(43, 96), torch.empty(43, 96)
    linear(x, weight, together)
    for row in range(43):
        linear(x[row : row + 1], weight, alone[row : row + 1])
    np.testing.assert_array_equal(alone.numpy(), together.numpy())
