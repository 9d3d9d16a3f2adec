"""RMS norm on the GPU, with an optional residual addition before it.

One program works on one row, in float32, with one rounding at the end; the sum is one reduction of a fixed shape, so a
row's bits depend on that row only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.tuning import next_power_of_two


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """out = weight * x / sqrt(mean(x²) + eps) (Zhang and Sennrich 2019); with a residual, residual += x is normalised
    instead.

    x, out, residual: [T, H], residual in place, rounded before it is read. weight: [H], any float type.
    """
    num_rows, width = x.shape
    if out.shape != x.shape or weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(
            f"norm operands do not fit: x {tuple(x.shape)}, out {tuple(out.shape)}, {weight.shape[0]} weights"
        )
    if num_rows == 0:
        return
    block = next_power_of_two(width)
    _rms_norm[(num_rows,)](
        x, weight, out, out if residual is None else residual, eps, x.stride(0), out.stride(0),
        0 if residual is None else residual.stride(0), WIDTH=width, HAS_RESIDUAL=residual is not None, BLOCK=block,
        num_warps=4 if block <= 4096 else 8, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _rms_norm(
    x, weight, out, residual, eps, x_row, out_row, residual_row, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + t * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + t * residual_row + columns
        rounded = (tl.load(at, mask=inside, other=0.0).to(tl.float32) + values).to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    values = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * out_row + columns, values.to(out.dtype.element_ty), mask=inside)
