"""Fixtures of the GPU kernels' tests."""

from __future__ import annotations

import numpy as np
import pytest
import triton
from triton.runtime import interpreter


@pytest.fixture
def rows_of_products_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter compute all rows of a product alike, as tensor cores do.

    It multiplies with BLAS, which adds up the last rows of a matrix in another order than the first ones. With a
    GPU there is nothing to patch, and the tests that ask for this see the hardware.
    """
    if not triton.knobs.runtime.interpret:
        return

    def create_dot(  # type: ignore[no-untyped-def]
        _self, a, b, d, _input_precision, _max_num_imprecise_acc
    ):
        products = a.data.astype(np.float32)[:, :, None] * b.data.astype(np.float32)[None]
        return interpreter.TensorHandle(products.sum(axis=1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
