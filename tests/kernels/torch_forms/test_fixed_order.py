"""Sums, products and exponentials of plain torch in one order: right, exact operations only, in any batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from app.kernels.matmul import reference
from tests.engine.cuda.exact_operations import ExactOperations
from tests.kernels.cases import TOLERANCE, normal, relative_error
from tests.kernels.torch_forms import fixed_order
from tests.kernels.torch_forms.fixed_order import exponential, folded_sum, product
from tests.seeds import rng


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 13, 64, 65])
def test_a_sum_is_the_sum_and_zeros_behind_it_change_nothing(count: int) -> None:
    terms = torch.from_numpy(normal(rng(), count, 3, 2))
    expected = terms.double().numpy().sum(0)
    padded = torch.cat([terms, torch.zeros(int(rng().integers(1, 90)), 3, 2)])
    with ExactOperations():
        found, again = folded_sum(terms.clone()), folded_sum(padded)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)
    assert torch.equal(found, again)


def test_a_sum_of_negative_zeros_is_zero() -> None:
    for count in (1, 2, 5):
        assert not torch.signbit(folded_sum(torch.full((count, 1), -0.0))).any()


@pytest.mark.parametrize("shape", [(0, 3, 4), (1, 1, 1), (3, 5, 0), (7, 33, 70), (9, 130, 200)])
@pytest.mark.parametrize("most_terms", [1, 700, fixed_order.MOST_TERMS])
def test_a_product_is_the_definitions_and_a_row_is_what_it_is_alone(
    shape: tuple[int, int, int], most_terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (num_rows, width, depth), generator = shape, rng()
    x, weight = normal(generator, num_rows, depth), normal(generator, width, depth)
    alone = [product(torch.from_numpy(row[None]), torch.from_numpy(weight))[0] for row in x]
    monkeypatch.setattr(fixed_order, "MOST_TERMS", most_terms)
    with ExactOperations():
        found = product(torch.from_numpy(x), torch.from_numpy(weight))
    assert relative_error(found.numpy(), reference.matmul(x, weight)) < TOLERANCE["float32"]
    for row, expected in zip(found, alone, strict=True):
        assert torch.equal(row, expected)


def test_an_exponential_is_right_to_the_last_digits() -> None:
    values = np.concatenate([rng().uniform(-700, 700, 500), rng().uniform(-1, 1, 500), [0.0, 0.5 * math.log(2)]])
    with ExactOperations():
        found = exponential(torch.from_numpy(values)).tolist()
    for value, power in zip(values.tolist(), found, strict=True):
        assert power == pytest.approx(math.exp(value), rel=1e-14), value
    assert found[-2] == 1.0


def test_an_exponential_of_what_is_no_number_or_too_large() -> None:
    found = exponential(torch.tensor([-math.inf, -1e30, 1e30, math.inf, math.nan])).float()
    assert found[:4].tolist() == [0.0, 0.0, math.inf, math.inf]
    assert found[4].isnan()
