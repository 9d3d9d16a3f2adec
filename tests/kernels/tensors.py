"""What tests of kernels on tensors share: devices, types, tolerances, and memory that is poison."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: ‖out - ref‖ / ‖ref‖, never loosened.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}
#: The forms of an operation that has all three, with the types each computes in.
FORMS = [("cpu", torch.float32), *itertools.product(("torch", "triton"), DTYPES)]


def device_of(form: str) -> torch.device:
    return torch.device("cpu") if form == "cpu" else DEVICE


def tensor(
    values: NDArray[np.generic], dtype: torch.dtype | None = None, device: torch.device = DEVICE
) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)


def numpy(values: torch.Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = values.cpu().double().numpy()
    return array


def error(out: torch.Tensor, expected: NDArray[np.float64], *parts: NDArray[np.float64]) -> float:
    """‖out - expected‖ / ‖expected‖, or by the largest norm of `parts`, whose sum may be small beside them.

    NaN anywhere is infinite.
    """
    if not torch.isfinite(out).all():
        return float("inf")
    size = max(float(np.linalg.norm(values)) for values in (expected, *parts))
    return float(np.linalg.norm(numpy(out) - expected) / max(size, 1e-30))


def poisoned(
    num_rows: int, width: int, dtype: torch.dtype, device: torch.device = DEVICE
) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN memory and the part of it an operation writes."""
    memory = torch.full((num_rows + 1, width + 3), torch.nan, dtype=dtype, device=device)
    return memory, memory[:num_rows, :width]


def assert_poison_left(memory: torch.Tensor, num_rows: int, width: int) -> None:
    assert torch.isnan(memory[num_rows:]).all()
    assert torch.isnan(memory[:, width:]).all()
