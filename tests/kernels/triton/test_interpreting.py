"""What the interpreter is made to do with bfloat16: products of the numbers, and rounding to the nearest even."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.cases import normal
from tests.kernels.tensors import DEVICE, error, numpy, tensor
from tests.seeds import rng


@triton.jit
def _product(a, b, sums, rounded, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + i * SIZE + j), tl.load(b + i * SIZE + j))
    tl.store(sums + i * SIZE + j, product)
    tl.store(rounded + i * SIZE + j, product.to(tl.bfloat16))


@pytest.mark.parametrize("alike", [False, True])
def test_products_are_exact_and_rounded_once(alike: bool, request: pytest.FixtureRequest) -> None:
    if alike:
        request.getfixturevalue("rows_of_products_alike")
    a, b = (tensor(normal(rng(), 16, 16), torch.bfloat16) for _ in range(2))
    sums = torch.full((16, 16), torch.nan, device=DEVICE)
    rounded = torch.full((16, 16), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    _product[(1,)](a, b, sums, rounded, SIZE=16)
    assert error(sums, numpy(a) @ numpy(b)) < 1e-6
    assert torch.equal(rounded, sums.bfloat16())
