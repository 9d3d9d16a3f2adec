"""What kernel tests share. Tolerances: max |out - ref| / max |ref|, per dtype."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def normal(generator: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return generator.standard_normal(shape).astype(np.float32)


def spaced_logits(generator: np.random.Generator, num_tokens: int, num_experts: int) -> NDArray[np.float32]:
    """Logits of experts in random order, so far apart that rounding does not change which of them are largest."""
    logits = np.tile(np.linspace(-2, 2, num_experts), (num_tokens, 1))
    spread = 1 / num_experts
    return (generator.permuted(logits, axis=1) + generator.uniform(-spread, spread, logits.shape)).astype(np.float32)


def relative_error(out: NDArray[np.floating], reference: NDArray[np.float64], *parts: NDArray[np.floating]) -> float:
    """Largest deviation relative to the reference's largest value; NaN anywhere is infinite.

    Relative to the largest of `parts`, if that is more: a sum of few numbers may be next to nothing beside what was
    added up, and rounding is not.
    """
    if out.size == 0:
        return 0.0
    if not np.isfinite(out).all():
        return float("inf")
    size = max(float(np.abs(values).max()) for values in (reference, *parts))
    return float(np.abs(out - reference).max() / max(size, 1e-30))


def check_forms_are_compared(monkeypatch: pytest.MonkeyPatch, self_test: ModuleType, name: str) -> None:
    """A form is used if it gives the bits of the reference called `name` in the module `self_test`, and only then."""
    forms, reference = self_test.machine_forms(), getattr(self_test, name)
    assert self_test.active_form() == forms[0]
    assert forms[-1] == "portable"

    def others(*operands: Any) -> Any:
        expected = reference(*operands)
        expected[-1, -1] = np.nextafter(expected[-1, -1], np.float32(np.inf))
        return expected

    monkeypatch.setattr(self_test, name, others)
    assert not self_test.reproduces_reference(forms[0])
    self_test.active_form.cache_clear()
    assert self_test.active_form() is None
    monkeypatch.undo()
    self_test.active_form.cache_clear()
    assert self_test.active_form() == forms[0]
