"""A kernel inside a kernel: linked, not compiled; and the kernel that Python calls, compiled as a whole."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from app.kernels.machine.jit import jit
from app.kernels.machine.jit_inline import KernelDispatcher


def _never_cached(function):  # type: ignore[no-untyped-def]
    """`jit` without the cache on disk, from which a kernel comes whole: nothing is compiled for it again."""
    return KernelDispatcher(function, targetoptions={"nopython": True, "nogil": True, "error_model": "numpy"})


@_never_cached
def _sum(values):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(values.shape[0]):
        total += values[i]
    return total


@_never_cached
def _mean(values):  # type: ignore[no-untyped-def]
    return _sum(values) / np.float32(values.shape[0])


@jit
def _square(x):  # type: ignore[no-untyped-def]
    return x * x


@jit
def _sum_of_squares(values):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(values.shape[0]):
        total += _square(values[i])
    return total


@jit
def _root(values):  # type: ignore[no-untyped-def]
    if values.shape[0] == 0:
        raise ValueError("no values")
    return np.sqrt(_sum_of_squares(values))


@pytest.fixture
def values() -> np.ndarray:
    return np.arange(5, dtype=np.float32)


def test_callers_of_a_kernel_compile_it_in_and_leave_no_machine_code_for_it(values: np.ndarray) -> None:
    assert _mean(values) == np.float32(2.0)
    assert len(_mean.overloads) == 1
    assert len(_sum.overloads) == 0, "only compiled code has called it"
    (inlined,) = _sum._inlined.overloads.values()
    assert inlined.library.get_pointer_to_function(inlined.fndesc.llvm_func_name) == 0
    (whole,) = _mean.overloads.values()
    assert whole.library.get_pointer_to_function(whole.fndesc.llvm_func_name) != 0


def test_a_kernel_that_compiled_code_has_called_can_be_called_from_python(values: np.ndarray) -> None:
    assert _root(values) == np.sqrt(np.float32(30.0))
    assert _sum_of_squares(values) == np.float32(30.0)
    assert _square(np.float32(3.0)) == np.float32(9.0)


def test_an_error_of_an_inner_kernel_reaches_python() -> None:
    with pytest.raises(ValueError, match="no values"):
        _outer(np.empty(0, np.float32))


@jit
def _outer(values):  # type: ignore[no-untyped-def]
    return _root(values) + np.float32(1.0)


def test_a_kernel_can_be_sent_to_another_process(values: np.ndarray) -> None:
    assert pickle.loads(pickle.dumps(_root))(values) == _root(values)
