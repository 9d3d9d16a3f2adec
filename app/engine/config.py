"""The engine's settings: one sentence and one laptop-friendly default each; unknown keys are errors."""

from __future__ import annotations

import importlib.util
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.engine.errors import ConfigError
from app.engine.pools.eviction import EvictionPolicy


class EngineConfig(BaseModel):
    """Settings of one engine replica. Checked before anything is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["torch", "jax"] = Field("torch", description="Which engine computes.")
    device: str = Field("cpu", description="Device of the torch engine: cpu or cuda[:index].")
    cuda_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="CUDA: type of weights, KV blocks and rank rows; the CPU engine computes in float32."
    )
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="CUDA: part of the device's memory for weights, KV blocks and adapters together."
    )
    memory_bytes: int = Field(0, ge=0, description="CUDA: the same in bytes; 0 takes memory_fraction.")
    deterministic: bool = Field(
        False,
        description="CUDA: fixed tiles everywhere, so that a request's bits are the same alone and in any company, as "
        "the CPU engine's always are; slower.",
    )
    num_threads: int = Field(0, ge=0, description="CPU threads for arithmetic; 0 takes every core allowed.")
    weight_storage: Literal["auto", "float32", "int8"] = Field(
        "auto",
        description="How base weights lie in memory on a CPU: auto takes 8 bits for the projections that lose nothing "
        "by it, float32 for the others; int8 (groups of 32) is always 8 bits, a third of the bytes.",
    )
    block_size: int = Field(16, ge=16, le=256, multiple_of=16, description="Tokens per KV block.")
    num_kv_blocks: int = Field(
        2048,
        ge=0,
        description="KV blocks: num_kv_blocks * block_size tokens fit in the cache; 0, CUDA only: as many as fit.",
    )
    adapter_rank_rows: int = Field(
        512, ge=0, description="Rank rows for adapters: resident ranks add up to at most this."
    )
    adapter_extra_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Memory for what resident adapters hold beside rank rows: DoRA scales, biases, norms, token rows, "
        "whole modules; taken as needed, at start by the JAX engine's forms other than cpu.",
    )
    adapter_eviction: EvictionPolicy = Field(
        "lru",
        description="Who leaves the rank rows: lru, lfu or cost (fewest bytes to write again per row held, by use).",
    )
    max_adapter_slots: int = Field(256, ge=1, description="Adapters resident at once, the base included.")
    max_batch_tokens: int = Field(256, ge=8, description="Tokens computed per step: decode tokens plus prefill chunks.")
    prefill_step_ms: int = Field(
        100,
        ge=0,
        description="While sequences decode, a step takes in as many prompt tokens as let it end in about this time, "
        "or in twice the time that it takes without, if that is longer. 0: as many as max_batch_tokens allows.",
    )
    max_batch_sequences: int = Field(64, ge=1, description="Sequences running at once.")
    max_waiting: int = Field(512, ge=1, description="Requests waiting for a turn before new ones are refused with 429.")
    max_context: int = Field(0, ge=0, description="Longest prompt plus answer; 0 takes the model's own limit.")
    adapter_write_bytes_per_step: int = Field(
        16 << 20,
        ge=1,
        description="Adapter bytes written per step while sequences run: a burst of cold ones cannot stall streams.",
    )
    prefix_cache: bool = Field(True, description="Reuse KV blocks of equal prefixes (same adapter, same tenant salt).")
    tensor_parallel: int = Field(1, ge=1, description="Devices that share one model; the JAX engine only.")
    jax_form: Literal["auto", "cpu", "xla", "pallas"] = Field(
        "auto",
        description="JAX: who computes: cpu, the project's CPU kernels inside the XLA program; xla, XLA alone; pallas, "
        "XLA with adapters' deltas in Pallas (for TPUs; interpreted on CPUs). auto takes cpu on CPUs, else xla.",
    )
    skip_precompile: bool = Field(
        False,
        description="JAX, CUDA: compile or capture each shape when it is first needed, for development; the first "
        "steps stall.",
    )
    compilation_cache_dir: str = Field(
        "", description="JAX: folder that keeps compiled programs between starts; empty keeps none."
    )

    def check_installed(self) -> None:
        """Raise ConfigError if the backend needs what this environment lacks."""
        if self.backend == "jax" and importlib.util.find_spec("jax") is None:
            raise ConfigError(
                "engine.backend is 'jax' but JAX is not installed: pip install 'polylora[jax]', or in a checkout "
                ".venv/bin/pip install --editable '.[jax]'"
            )

    @property
    def is_cuda(self) -> bool:
        """Whether the torch engine is to run on a GPU."""
        return self.backend == "torch" and self.device.startswith("cuda")

    @property
    def rank_alignment(self) -> int:
        """Runs of rank rows are multiples of it: what a tensor core, or eight lanes of a CPU, multiply at a time."""
        return 16 if self.is_cuda else 8

    @model_validator(mode="after")
    def _blocks_can_be_counted(self) -> Self:
        if self.num_kv_blocks < 2 and not (self.is_cuda and self.num_kv_blocks == 0):
            raise ValueError(
                f"num_kv_blocks is {self.num_kv_blocks}; at least 2 are needed (0, as many as fit, is for device cuda)"
            )
        return self
