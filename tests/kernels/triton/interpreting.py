"""Triton's interpreter made to compute bfloat16 as a GPU does; everything else stays the interpreter's.

In: a monkeypatch, for the length of a test. Out: nothing. The interpreter keeps a bfloat16 in 16 bits of an integer. It
multiplies those integers in a product, and cuts off float32 where hardware rounds to the nearest. Here products
read the numbers that the bits stand for, and sums are float32. With a GPU there is nothing to patch.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def patch_bfloat16(monkeypatch: pytest.MonkeyPatch, *, rows_alike: bool = False) -> None:
    """`rows_alike`: all rows of a product are added up in one order, as in tensor cores; BLAS has another for the last
    rows of a matrix than for the first ones."""
    if not triton.knobs.runtime.interpret:
        return
    cast = InterpreterBuilder.cast_impl

    def create_dot(_self: Any, a: Any, b: Any, d: Any, _precision: object, _max_imprecise: object) -> Any:
        left, right = _float32(a), _float32(b)
        product = (left[:, :, None] * right[None]).sum(axis=1) if rows_alike else left @ right
        return TensorHandle(product + d.data, d.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return TensorHandle(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, source, target)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)


def _float32(handle: Any) -> NDArray[np.float32]:
    values = handle.data.view(ml_dtypes.bfloat16) if handle.dtype.scalar == tl.bfloat16 else handle.data
    found: NDArray[np.float32] = values.astype(np.float32)
    return found
