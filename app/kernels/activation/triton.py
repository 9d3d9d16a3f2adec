"""Gated activations on the GPU: act(gate) * up, with gate and up side by side. Each element is computed by itself, in
float32, with one rounding at the end.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from app.kernels.tuning import ceil_div

#: Columns of one program.
_GATED_COLUMNS = 1024


def gated_activation(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    activation: Literal["silu", "gelu_tanh"],
    limit: float | None = None,
    alpha: float = 1.0,
) -> None:
    """out = act(gate) * up (Shazeer 2020). gate_up: [T, 2 I], gate first. out: [T, I].

    With a limit: (up + 1) * gate * logistic(alpha * gate), clamped (`reference.clamped_gated_activation`).
    """
    num_rows, width = out.shape
    if gate_up.shape != (num_rows, 2 * width) or activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r} of {tuple(gate_up.shape)} does not fit out {tuple(out.shape)}")
    if num_rows == 0:
        return
    _gated_activation[(num_rows, ceil_div(width, _GATED_COLUMNS))](
        gate_up, out, gate_up.stride(0), out.stride(0), limit or 0.0, alpha, WIDTH=width, IS_SILU=activation == "silu",
        IS_CLAMPED=limit is not None, BLOCK=_GATED_COLUMNS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def _gated_activation(
    gate_up, out, gate_row, out_row, limit, alpha, WIDTH: tl.constexpr, IS_SILU: tl.constexpr,
    IS_CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up + t * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * gate_row + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
        exponent = alpha * gate
    elif IS_SILU:
        exponent = gate
    else:  # (1 + tanh(z)) / 2 is the logistic function of 2 z
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # exp of a negative number only, so that nothing overflows.
    small = tl.exp(-tl.abs(exponent))
    logistic = tl.where(exponent >= 0, 1.0 / (1.0 + small), small / (1.0 + small))
    tl.store(out + t * out_row + columns, (gate * logistic * up).to(out.dtype.element_ty), mask=inside)
