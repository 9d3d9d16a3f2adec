"""The engine's settings: what all engines share, and one section for the device that computes.

In: a mapping (YAML) or keyword arguments; `cpu`, `cuda` or `xla` is the section, and without any of them it is `cpu`
with its defaults. Out: a frozen `EngineConfig`, checked before anything is loaded. An unknown key is an error, and
so are two sections.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from app.engine.errors import ConfigError

#: Who leaves a full tier first; `app.engine.pools.eviction` says what the names mean.
EvictionPolicy = Literal["lru", "lfu", "cost"]

WeightDtype = Literal["auto", "float32", "int8"]


#: The most tokens that a sequence may guess in a step.
MAX_DRAFT_TOKENS = 16
Speculation = Literal["off", "auto"] | Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS, strict=True)]


class _Section(BaseModel):
    """Settings of one kind of device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: The section's key in EngineConfig.
    name: ClassVar[str]
    #: Ranks are counted in multiples of it: what a tensor core, or eight lanes of a CPU, multiply at a time.
    rank_alignment: ClassVar[int]
    #: What has to be importable, and the optional dependency of this package that brings it.
    needs: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""


class CpuConfig(_Section):
    """This project's own kernels on this machine's processors."""

    name = "cpu"
    rank_alignment = 8

    num_threads: int = Field(0, ge=0, description="Threads for arithmetic; 0 takes every core allowed.")
    weight_dtype: WeightDtype = Field(
        "auto",
        description="How base weights lie in memory: auto takes 8 bits for the projections that lose nothing by it, "
        "float32 for the others; int8 (groups of 32) is always 8 bits, a third of the bytes.",
    )


class CudaConfig(_Section):
    """One GPU of NVIDIA, by torch and Triton."""

    name = "cuda"
    rank_alignment = 16
    needs = ("torch", "triton")
    extra = "cuda"

    index: int = Field(0, ge=0, description="Which of the GPUs that the process sees.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Type of weights, KV blocks and rank rows.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Part of the device's memory for weights, KV blocks and adapters together."
    )
    memory_bytes: int = Field(0, ge=0, description="The same in bytes; 0 takes gpu_memory_utilization.")
    batch_invariant: bool = Field(
        False,
        description="Fixed tiles everywhere, so that a request's bits are the same alone and in any company, as with "
        "cpu they always are; slower.",
    )
    skip_precompile: bool = Field(
        False,
        description="Capture each decode step when it is first needed, for development; the first steps stall.",
    )


class XlaConfig(_Section):
    """Whatever XLA compiles for, by JAX: TPUs, GPUs, and several devices for one model."""

    name = "xla"
    rank_alignment = 8
    needs = ("jax",)
    extra = "jax"

    platform: Literal["cpu", "gpu", "tpu"] = Field("cpu", description="Which of JAX's platforms computes.")
    kernel_backend: Literal["xla", "pallas"] = Field(
        "xla",
        description="Who computes adapters' deltas: xla, loops that XLA compiles, or pallas, a kernel for TPUs; on a "
        "CPU Pallas interprets it, which is slow and for tests.",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="Devices that share one model; with expert_parallel, devices that share each expert."
    )
    expert_parallel: int = Field(
        1,
        ge=1,
        description="Of a mixture of experts: into how many parts its experts fall. A model takes as many "
        "times tensor_parallel devices, and what is no expert is divided over all of them.",
    )
    skip_precompile: bool = Field(
        False,
        description="Compile each shape when it is first needed, for development; the first steps stall.",
    )
    compilation_cache_dir: str = Field(
        "", description="Folder that keeps compiled programs between starts; empty keeps none."
    )


DeviceConfig = CpuConfig | CudaConfig | XlaConfig
_SectionT = TypeVar("_SectionT", CpuConfig, CudaConfig, XlaConfig)
_SECTIONS = ("cpu", "cuda", "xla")


class EngineConfig(BaseModel):
    """Settings of one engine replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: CpuConfig | None = Field(None, description="Compute on the processors: the default.")
    cuda: CudaConfig | None = Field(None, description="Compute on a GPU of NVIDIA.")
    xla: XlaConfig | None = Field(None, description="Compute with JAX.")
    block_size: int = Field(16, ge=16, le=256, multiple_of=16, description="Tokens per KV block.")
    num_kv_blocks: int = Field(
        2048,
        ge=0,
        description="KV blocks: num_kv_blocks * block_size tokens fit in the cache; 0, cuda only: as many as fit.",
    )
    lora_pool_rows: int = Field(
        512,
        ge=0,
        description="Rank rows for adapters. One takes as many as its own modules fill, rounded up to a power of two; "
        "with cpu half where it was saved in bfloat16; with xla as many as its largest rank.",
    )
    extra_weights_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Memory for what resident adapters hold beside rank rows: DoRA scales, biases, norms, token rows, "
        "whole modules, experts' rows; taken as needed. xla takes all of it at start for experts' rows, else it serves "
        "DoRA and biases only, in tables that are as large as its rank rows want them; 0 refuses such adapters.",
    )
    lora_eviction_policy: EvictionPolicy = Field(
        "lru",
        description="Who leaves the rank rows: lru, lfu or cost (fewest bytes to write again per row held, by use).",
    )
    max_loras: int = Field(256, ge=1, description="Adapters resident at once, the base included.")
    merged_adapter: str = Field(
        "",
        description="Path of an adapter (PEFT folder or card) to merge into the weights when an engine starts: it "
        "serves this adapter and refuses everything else, the base included. For a service of one adapter; whether it "
        "pays is in docs/performance.md.",
    )
    max_num_batched_tokens: int = Field(
        256, ge=8, description="Tokens computed per step: decode tokens plus prefill chunks."
    )
    target_step_ms: int = Field(
        100,
        ge=0,
        description="While sequences decode, a step takes in as many prompt tokens as let it end in about this time, "
        "or in twice the time that it takes without, if that is longer. 0: as many as max_num_batched_tokens allows.",
    )
    max_tenant_slowdown: float = Field(
        0.0,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="While several tenants run, a step takes at most so many times as long as it would without the "
        "tenants that run most, which get no fewer tokens than the others all the same. It costs the wide ones "
        "throughput. 0: whoever runs is computed in every step; else at least 1.",
    )
    max_num_seqs: int = Field(64, ge=1, description="Sequences running at once.")
    max_queued_requests: int = Field(
        512, ge=1, description="Requests waiting for a turn before new ones are refused with 429."
    )
    max_model_len: int = Field(0, ge=0, description="Longest prompt plus answer; 0 takes the model's own limit.")
    lora_load_bytes_per_step: int = Field(
        16 << 20,
        ge=1,
        description="Adapter bytes written per step while sequences run: a burst of cold ones cannot stall streams.",
    )
    max_step_s: float = Field(
        30.0,
        gt=0,
        description="A step that lasts longer than this, and 50 times longer than usual, hangs: its replica is "
        "replaced. Not with skip_precompile, where a step may compile.",
    )
    enable_prefix_caching: bool = Field(
        True, description="Reuse KV blocks of equal prefixes (same adapter, same tenant salt)."
    )
    speculative_decoding: Speculation = Field(
        "auto",
        description="Verify guessed tokens (from the prompt and the answer so far, a grammar, a `prediction`) where "
        "the next one is drawn; answers keep their bits. auto: with cpu, while few sequences run and guesses are "
        f"right; off; or 1 to {MAX_DRAFT_TOKENS}, cpu only: always guess so many.",
    )

    @property
    def device(self) -> DeviceConfig:
        """The one section that is set."""
        device = self.cpu or self.cuda or self.xla
        assert device is not None, "validation sets a section where there is none"
        return device

    @property
    def rank_alignment(self) -> int:
        """An adapter takes at most its largest rank, rounded up to this times a power of two, in rank rows."""
        return self.device.rank_alignment

    @property
    def step_limit_s(self) -> float:
        """`max_step_s`, or none where a step may compile."""
        return math.inf if getattr(self.device, "skip_precompile", False) else self.max_step_s

    def section(self, kind: type[_SectionT]) -> _SectionT:
        """The section of this kind, for the engine that needs it; ConfigError if another one is set."""
        device = self.device
        if not isinstance(device, kind):
            raise ConfigError(f"engine.{device.name} is set, and this engine reads engine.{kind.name}")
        return device

    def on(self, device: DeviceConfig) -> EngineConfig:
        """The same shared settings on this device."""
        shared = {name: value for name, value in self if name not in _SECTIONS}
        return EngineConfig(**shared, **{device.name: device})

    def check_installed(self) -> None:
        """Raise ConfigError if the section needs what this environment lacks."""
        device = self.device
        for package in device.needs:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"engine.{device.name} is set but {package} is not installed: pip install "
                    f"'polylora[{device.extra}]', or in a checkout .venv/bin/pip install --editable '.[{device.extra}]'"
                )

    @model_validator(mode="before")
    @classmethod
    def _one_section(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        found = [key for key in _SECTIONS if key in values]
        for key in found:
            if values[key] is None:
                raise ValueError(f"engine.{key} is empty; write {key}: {{}} for its defaults, or leave it out")
        if len(found) > 1:
            raise ValueError(f"an engine computes on one device, but engine.{' and engine.'.join(found)} are set")
        return values if found else {**values, "cpu": {}}

    @field_validator("speculative_decoding", mode="before")
    @classmethod
    def _off_in_yaml(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of off

    @field_validator("merged_adapter")
    @classmethod
    def _merging_is_a_choice(cls, value: str) -> str:
        if value == "auto":
            raise ValueError(
                "engine.merged_adapter is 'auto', but whether to merge is not chosen here: a merged engine refuses the "
                "base and every other adapter, so speed alone cannot decide it. Name the adapter's path (one adapter "
                "and a base in float32: merging is faster) or leave it out; docs/performance.md has both measured"
            )
        return value

    @model_validator(mode="after")
    def _guesses_can_be_verified(self) -> Self:
        if isinstance(self.speculative_decoding, int) and self.cpu is None:
            raise ValueError(
                f"engine.speculative_decoding is {self.speculative_decoding}, but engine.{self.device.name} cannot verify guessed tokens "
                "with the bits of drawing them one by one; set auto or off, or use engine.cpu"
            )
        return self

    @model_validator(mode="after")
    def _a_slowdown_slows(self) -> Self:
        if 0 < self.max_tenant_slowdown < 1:
            raise ValueError(
                f"engine.max_tenant_slowdown is {self.max_tenant_slowdown}: no step is faster for others being in it; "
                "say at least 1, or 0 for no bound"
            )
        return self

    @model_validator(mode="after")
    def _blocks_can_be_counted(self) -> Self:
        if self.num_kv_blocks < 2 and not (self.cuda and self.num_kv_blocks == 0):
            raise ValueError(
                f"num_kv_blocks is {self.num_kv_blocks}; at least 2 are needed (0, as many as fit, is for engine.cuda)"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_other_sections(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is written is read again: a section that is not set is no key."""
        return {key: value for key, value in serialize(self).items() if key not in _SECTIONS or value is not None}
