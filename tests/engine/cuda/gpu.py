"""GPU backends for tests: on the device if there is one, else on the CPU in plain torch; float32 by default.

`POLYLORA_TEST_CUDA=1` asks for the device and Triton's kernels; without it nothing depends on what the machine has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from app.engine.config import CudaConfig, EngineConfig
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.kernels import TRITON, Kernels
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from app.engine.models.spec import ModelSpec
from tests.kernels.torch_forms import (
    activation,
    bgmv,
    dora,
    latent_attention,
    matmul,
    moe_lora,
    moe_routing,
    norms,
    paged_attention,
    rotary,
    sgmv,
)
from tests.kernels.torch_forms.fixed_order import exponential

KernelForm = Literal["triton", "torch"]

ON_CUDA = os.environ.get("POLYLORA_TEST_CUDA") == "1"
DEVICE = torch.device("cuda", 0) if ON_CUDA else torch.device("cpu")
FORM: KernelForm = "triton" if ON_CUDA else "torch"


def exact_exp(x: torch.Tensor) -> torch.Tensor:
    """torch's own on a CPU depends on where an element stands: vectors, and scalar code for what is left over."""
    return exponential(x).float()


TORCH = Kernels(
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
    dora_scale=dora.dora_scale,
    exp=exact_exp,
)
#: Without a GPU, Triton's kernels run in its interpreter.
KERNELS = {
    "torch": TORCH,
    "triton": TRITON if ON_CUDA else replace(TRITON, dora_scale=TORCH.dora_scale, exp=TORCH.exp),
}


def gpu_config(**settings: Any) -> EngineConfig:
    """Settings that all engines share and those of the section `cuda`, side by side."""
    sizes = {
        "dtype": "float32",
        "num_kv_blocks": 256,
        "lora_pool_rows": 1024,
        "max_loras": 64,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.5,
        "skip_precompile": True,
    }
    settings = sizes | settings
    cuda = {key: settings.pop(key) for key in CudaConfig.model_fields if key in settings}
    return EngineConfig(cuda=CudaConfig(**cuda), **settings)


def gpu_backend(
    spec: ModelSpec, tensors: Iterable[tuple[str, np.ndarray]], config: EngineConfig, form: KernelForm = FORM
) -> CudaBackend:
    """`form` "torch" is always on the CPU: it looks at values on the host, which a graph cannot."""
    return CudaBackend(spec, tensors, config, DEVICE if form == FORM else torch.device("cpu"), KERNELS[form])


def gpu_backend_of_checkpoint(checkpoint: Checkpoint, config: EngineConfig, form: KernelForm = FORM) -> CudaBackend:
    return gpu_backend(checkpoint.spec, checkpoint.tensors(), config, form)


def gpu_backend_of_model(model: Any, folder: Path, config: EngineConfig, form: KernelForm = FORM) -> CudaBackend:
    """For a transformers model, through its files."""
    model.save_pretrained(folder)
    return gpu_backend_of_checkpoint(load_checkpoint(folder), config, form)
