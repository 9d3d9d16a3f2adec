"""The table of kernels that the GPU decoder calls: Triton's, and torch's for sampling and DoRA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from app.kernels.activation import triton as activation
from app.kernels.bgmv import triton as bgmv
from app.kernels.dora.torch import dora_scale
from app.kernels.matmul import triton as matmul
from app.kernels.mla_attention import triton as latent_attention
from app.kernels.moe_lora import triton as moe_lora
from app.kernels.moe_routing import triton as moe_routing
from app.kernels.norms import triton as norms
from app.kernels.paged_attention import triton as paged_attention
from app.kernels.rotary import triton as rotary
from app.kernels.sgmv import triton as sgmv


@dataclass(frozen=True, slots=True)
class Kernels:
    """One function per operation; see `app/kernels/<operation>/`. Tests without a GPU pass their own.

    exp: element by element, in float32; an element's bits must not depend on its place in the tensor.
    """

    rms_norm: Callable[..., None]
    gated_activation: Callable[..., None]
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
    expert_linear: Callable[..., None]
    add_lora_to_experts: Callable[..., None]
    combine: Callable[..., None]
    rotate_latents: Callable[..., None]
    latent_attention: Callable[..., None]
    dora_scale: Callable[..., torch.Tensor]
    exp: Callable[[torch.Tensor], torch.Tensor]


TRITON = Kernels(
    rms_norm=norms.rms_norm,
    gated_activation=activation.gated_activation,
    rotate_and_write=rotary.rotate_and_write,
    paged_attention=paged_attention.paged_attention,
    add_lora_to_rows=bgmv.add_lora,
    add_lora_to_runs=sgmv.add_lora,
    block_tokens=sgmv.block_tokens,
    segments=sgmv.segments,
    max_segments=sgmv.max_segments,
    fixed_linear=matmul.linear,
    route=moe_routing.route,
    block_rows=moe_routing.block_rows,
    sort_pairs=moe_routing.sort_pairs,
    expert_linear=moe_lora.expert_linear,
    add_lora_to_experts=moe_lora.add_lora,
    combine=moe_routing.combine,
    rotate_latents=latent_attention.rotate_and_store,
    latent_attention=latent_attention.latent_attention,
    dora_scale=dora_scale,
    exp=torch.exp,
)
