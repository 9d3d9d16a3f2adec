"""Triton's interpreter made to compute bfloat16 as a GPU does; everything else stays the interpreter's.

In: a monkeypatch, for the length of a test. Out: nothing. The interpreter keeps a bfloat16 in 16 bits of an integer. It
multiplies those integers in a product, and cuts off float32 where hardware rounds to the nearest. Here products
read the numbers that the bits stand for, and sums are float32. With a GPU there is nothing to patch.

Where a test compares bits, the interpreter's products and exponentials are not NumPy's either: BLAS chooses an order of
sums by shape and processor. What is left of NumPy are sums over an axis of an array of fixed shape: one loop,
the same for each of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def patch_bfloat16(monkeypatch: pytest.MonkeyPatch, *, rows_alike: bool = False) -> None:
    """`rows_alike`: all rows of a product are added up in one order, as in tensor cores, and every exponential is
    computed alone."""
    if not triton.knobs.runtime.interpret:
        return
    cast = InterpreterBuilder.cast_impl

    def create_dot(_self: Any, a: Any, b: Any, d: Any, _precision: object, _max_imprecise: object) -> Any:
        left, right = _float32(a), _float32(b)
        product = _product_in_order(left, right) if rows_alike else left @ right
        return TensorHandle(product + d.data, d.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return TensorHandle(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(self, source, target)

    if rows_alike:
        monkeypatch.setattr(InterpreterBuilder, "create_exp", _one_by_one(math.exp))
        monkeypatch.setattr(InterpreterBuilder, "create_exp2", _one_by_one(math.exp2))
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)


def _product_in_order(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """[M, K] times [K, N]: every element is added up in the order of k."""
    sums = np.zeros((len(left), right.shape[1]), np.float32)
    for k in range(len(right)):
        sums += left[:, k : k + 1] * right[k]
    return sums


def _one_by_one(function: Callable[[float], float]) -> Callable[[Any, Any], Any]:
    """An operation of the interpreter that calls `function` for each element (arguments above 700 count as 700)."""

    def create(_self: Any, argument: Any) -> Any:
        values = argument.data
        with np.errstate(over="ignore"):
            found = np.array([function(min(value, 700.0)) for value in values.ravel().tolist()]).astype(values.dtype)
        return TensorHandle(found.reshape(values.shape), argument.dtype.scalar)

    return create


def _float32(handle: Any) -> NDArray[np.float32]:
    values = handle.data.view(ml_dtypes.bfloat16) if handle.dtype.scalar == tl.bfloat16 else handle.data
    found: NDArray[np.float32] = values.astype(np.float32)
    return found
