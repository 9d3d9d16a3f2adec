"""The kernels behind the GPU decoder: Triton's, or the same in plain torch where there is no Triton to compile them.

In: which form is wanted. Out: a `Kernels`. Both forms have the same signatures, so the decoder does not know which
it has; tests run it with either on the CPU (Triton's through its interpreter).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

KernelForm = Literal["triton", "torch"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """One function per operation; see `app/kernels/<operation>/`."""

    rms_norm: Callable[..., None]
    gated: Callable[..., None]
    rotate_and_write: Callable[..., None]
    paged_attention: Callable[..., None]
    add_lora_to_rows: Callable[..., None]
    add_lora_to_runs: Callable[..., None]
    block_tokens: Callable[..., int]
    segments: Callable[..., Any]
    max_segments: Callable[..., int]
    fixed_linear: Callable[..., None]
    route: Callable[..., None]
    block_rows: Callable[..., int]
    sort_pairs: Callable[..., Any]
    expert_product: Callable[..., None]
    add_lora_to_experts: Callable[..., None]
    combine: Callable[..., None]
    rotate_latents: Callable[..., None]
    latent_attention: Callable[..., None]


def load_kernels(form: KernelForm) -> Kernels:
    """Import one form. ModuleNotFoundError if Triton is wanted and not installed."""
    names = (
        "norms", "rotary", "activation", "paged_attention", "bgmv", "sgmv", "matmul", "moe_routing", "moe_lora",
        "latent_attention",
    )  # fmt: skip
    modules = (import_module(f"app.kernels.{name}.{form}") for name in names)
    norms, rotary, activation, attention, bgmv, sgmv, matmul, routing, experts, latents = modules
    return Kernels(
        rms_norm=norms.rms_norm,
        gated=activation.gated,
        rotate_and_write=rotary.rotate_and_write,
        paged_attention=attention.paged_attention,
        add_lora_to_rows=bgmv.add_lora,
        add_lora_to_runs=sgmv.add_lora,
        block_tokens=sgmv.block_tokens,
        segments=sgmv.segments,
        max_segments=sgmv.max_segments,
        fixed_linear=matmul.linear,
        route=routing.route,
        block_rows=routing.block_rows,
        sort_pairs=routing.sort_pairs,
        expert_product=experts.product,
        add_lora_to_experts=experts.add_lora,
        combine=routing.combine,
        rotate_latents=latents.rotate_and_store,
        latent_attention=latents.latent_attention,
    )
