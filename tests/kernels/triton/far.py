"""Operands whose elements lie further apart than 32 bits count, in memory of which only what is touched exists.

In: a tensor and a dimension. Out: the same values, the last of that dimension 2**31 elements behind the first; or all
of them behind (`behind`). There is as much mapped memory before the first element, all zeros, so that an index that
wraps around finds a wrong number instead of ending the process.
"""

from __future__ import annotations

import mmap

import torch

from tests.kernels.tensors import DEVICE

FAR = 1 << 31
#: Linux: pages that are never touched are not counted.
_MAP_NORESERVE = 0x4000


def spread(values: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy with the strides of a contiguous tensor in all dimensions but `dim`, which has at least two places."""
    inner = values.numel() // values.shape[dim]
    step = -(-FAR // (values.shape[dim] - 1)) + 16 & ~15
    strides = list(values.transpose(0, dim).contiguous()[0].stride())
    strides.insert(0, step)
    strides[0], strides[dim] = strides[dim], strides[0]
    num_elements = 2 * FAR + inner + 32 * values.shape[dim]
    far = torch.as_strided(_zeros(num_elements, values.dtype), values.shape, strides, FAR)
    far.copy_(values)
    assert (far.shape[dim] - 1) * far.stride(dim) >= FAR
    return far


def behind(values: torch.Tensor) -> torch.Tensor:
    """Memory whose element 2**31 is the first of the values [M]."""
    whole = _zeros(2 * FAR + len(values), values.dtype)
    whole[2 * FAR :] = values
    return whole[FAR:]


def _zeros(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    if DEVICE.type == "cuda":
        return torch.zeros(num_elements, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize, flags=flags), dtype=dtype)
