"""The engine's settings: those that all engines share, and one section for the device.

`cpu`, `cuda`, `xla` or `vllm` is the section; without any it is `cpu` with its defaults. The settings are checked
before anything is loaded; an unknown key is an error, and so are two sections.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from app.engine.errors import ConfigError

#: Which adapter leaves a full tier first; explained in `app.engine.pools.eviction`.
EvictionPolicy = Literal["lru", "lfu", "cost"]

WeightDtype = Literal["auto", "float32", "int8"]
KvCacheDtype = Literal["auto", "float32", "bfloat16"]
#: Arithmetic of the base model's products: `app.kernels.int8_matmul.reference` and its neighbour in `bf16_matmul`.
Compute = Literal["float32", "int8", "bfloat16"]


#: The most draft tokens of a sequence in a step.
MAX_DRAFT_TOKENS = 16
Speculation = Literal["off", "auto"] | Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS, strict=True)]


class _Section(BaseModel):
    """Settings of one kind of device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: The section's key in EngineConfig.
    name: ClassVar[str]
    #: Ranks are rounded up to a multiple of it: the width of a tensor core's tile, or of eight CPU lanes.
    rank_alignment: ClassVar[int]
    #: The packages that must be importable, and the optional dependency of this project that installs them.
    needs: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""


class CpuConfig(_Section):
    """This project's own kernels on the processors of this machine."""

    name = "cpu"
    rank_alignment = 8

    num_threads: int = Field(0, ge=0, description="Threads for arithmetic; 0 takes every core allowed.")
    weight_dtype: WeightDtype = Field(
        "auto",
        description="Type of the base weights in memory: auto takes int8 for the projections that lose nothing by it "
        "and float32 for the others; int8 (groups of 32) takes int8 for all, a third of the bytes.",
    )
    compute: Compute = Field(
        "float32",
        description="Arithmetic of base products: float32; int8, faster and less exact, for projections in 8 bits: "
        "their inputs are rounded to 8 bits in groups of 32, as by llama.cpp; or bfloat16, which rounds weights and "
        "inputs to bfloat16, for processors with AMX. Each is a base model version of its own, with its "
        "own tenants and adapters.",
    )
    kv_cache_dtype: KvCacheDtype = Field(
        "auto",
        description="Type of keys and values in KV memory: auto takes float32; bfloat16 takes half the bytes and "
        "rounds. Sums stay in float32. Another type is a base model version of its own, as for compute.",
    )

    @property
    def kv_value_bytes(self) -> int:
        """Bytes of one number in KV memory."""
        return 2 if self.kv_cache_dtype == "bfloat16" else 4

    @model_validator(mode="after")
    def _check_compute(self) -> Self:
        if self.compute == "int8" and self.weight_dtype == "float32":
            raise ValueError(
                "engine.cpu.compute is int8, which multiplies weights stored in 8 bits, but engine.cpu.weight_dtype is "
                "float32; set it to auto or int8"
            )
        if self.compute == "bfloat16" and self.weight_dtype != "auto":
            raise ValueError(
                "engine.cpu.compute is bfloat16, which stores the weights that it multiplies in bfloat16, but "
                f"engine.cpu.weight_dtype is {self.weight_dtype}; set it to auto"
            )
        return self


class CudaConfig(_Section):
    """One NVIDIA GPU, with torch and Triton."""

    name = "cuda"
    rank_alignment = 16
    needs = ("torch", "triton")
    extra = "cuda"

    index: int = Field(0, ge=0, description="Index of the GPU among those that the process sees.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Type of weights, KV blocks and rank rows.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Part of the device's memory for weights, KV blocks and adapters together."
    )
    memory_bytes: int = Field(0, ge=0, description="The same limit in bytes; 0: use gpu_memory_utilization.")
    batch_invariant: bool = Field(
        False,
        description="Fixed tile sizes, so that a request's tokens have the same bits alone and in any batch, which cpu "
        "always guarantees; slower.",
    )
    skip_precompile: bool = Field(
        False,
        description="Capture each decode graph at its first use, for development; the first steps are slow.",
    )


class XlaConfig(_Section):
    """Any device that JAX's XLA compiles for: TPUs, GPUs, and several devices for one model."""

    name = "xla"
    rank_alignment = 8
    needs = ("jax",)
    extra = "jax"

    platform: Literal["cpu", "gpu", "tpu"] = Field("cpu", description="The JAX platform to compute on.")
    kernel_backend: Literal["xla", "pallas"] = Field(
        "xla",
        description="Kernels of LoRA products: xla, loops that XLA compiles, or pallas, a kernel for TPUs, which a CPU "
        "interprets slowly, for tests.",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="Devices that share one model; with expert_parallel, devices that share each expert."
    )
    expert_parallel: int = Field(
        1,
        ge=1,
        description="Number of parts that a mixture's experts are divided into. A model then takes expert_parallel "
        "times tensor_parallel devices; other weights are divided over all of them.",
    )
    skip_precompile: bool = Field(
        False,
        description="Compile each shape at its first use, for development; the first steps are slow.",
    )
    compilation_cache_dir: str = Field(
        "", description="Folder of compiled programs, reused by later starts; empty: none."
    )


class VllmConfig(_Section):
    """vLLM, in a process and an environment of its own (docs/how-to/gpu.md)."""

    name = "vllm"

    python: str = Field(
        min_length=1, description="Interpreter of an environment that contains vLLM 0.32; polylora never imports it."
    )
    worker: str = Field(
        "", description="Program that hosts the engine (docs/reference/engine-protocol.md); empty: vLLM's."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of weights and KV memory; auto: the checkpoint's."
    )
    runner: Literal["generate", "pooling"] = Field(
        "generate", description="generate: text. pooling: embeddings instead, pooled as the checkpoint says."
    )
    quantization: str = Field(
        "", description="vLLM's quantization method (fp8, awq, gptq, ...); empty: what the checkpoint says."
    )
    tensor_parallel_size: int = Field(1, ge=1, le=8, description="GPUs of one machine that share the model.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Part of each GPU's memory that vLLM takes.")
    max_loras: int = Field(8, ge=1, description="Adapters on the device at once: vLLM's slots.")
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = Field(
        64, description="Largest rank of an adapter; each slot is this large."
    )
    max_cpu_loras: int = Field(
        0, ge=0, description="Adapters that vLLM keeps in host memory, those on the device included; 0: max_loras."
    )
    batch_invariant: bool = Field(
        False, description="vLLM's batch-invariant kernels (GPU only): a request's tokens do not depend on its batch."
    )
    extra_args: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of vLLM's AsyncEngineArgs, passed on as they are."
    )

    @model_validator(mode="after")
    def _check_cpu_loras(self) -> Self:
        if 0 < self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"engine.vllm.max_cpu_loras is {self.max_cpu_loras} but must be 0 or at least max_loras, "
                f"{self.max_loras}"
            )
        return self


DeviceConfig = CpuConfig | CudaConfig | XlaConfig | VllmConfig
_SectionT = TypeVar("_SectionT", CpuConfig, CudaConfig, XlaConfig, VllmConfig)
_SECTIONS = ("cpu", "cuda", "xla", "vllm")
#: Settings of our own memory and steps, which vLLM has its own of.
_NOT_VLLM = {
    "block_size": "engine.vllm.extra_args",
    "num_kv_blocks": "engine.vllm.gpu_memory_utilization",
    "lora_pool_rows": "engine.vllm.max_loras and max_lora_rank",
    "extra_weights_bytes": "",
    "max_loras": "engine.vllm.max_loras",
    "merged_adapter": "",
    "max_num_batched_tokens": "engine.vllm.extra_args",
    "target_step_ms": "",
    "max_tenant_slowdown": "",
    "speculative_decoding": "engine.vllm.extra_args",
    "lora_load_bytes_per_step": "",
}


class EngineConfig(BaseModel):
    """Settings of one engine replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: CpuConfig | None = Field(None, description="Compute on the CPU: the default.")
    cuda: CudaConfig | None = Field(None, description="Compute on an NVIDIA GPU.")
    xla: XlaConfig | None = Field(None, description="Compute with JAX.")
    vllm: VllmConfig | None = Field(None, description="Compute with vLLM, in a process of its own.")
    block_size: int = Field(16, ge=16, le=256, multiple_of=16, description="Tokens per KV block.")
    num_kv_blocks: int = Field(
        2048,
        ge=0,
        description="KV blocks: the KV cache holds num_kv_blocks * block_size tokens; 0, cuda only: as many as fit.",
    )
    lora_pool_rows: int = Field(
        512,
        ge=0,
        description="Rank rows of the LoRA pool. An adapter takes as many as its modules fill, rounded up to a power "
        "of two; with cpu half as many if it was saved in bfloat16; with xla as many as its largest rank.",
    )
    extra_weights_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Memory for resident adapters' extra weights: DoRA scales, biases, norms, token rows, whole "
        "modules, experts' rows; allocated as needed. xla allocates all of it at start for experts' rows and otherwise "
        "serves DoRA and biases only, in tables whose size follows from lora_pool_rows. 0 rejects such adapters.",
    )
    lora_eviction_policy: EvictionPolicy = Field(
        "lru",
        description="Which adapter leaves the LoRA pool first: lru, lfu, or cost (fewest bytes to write again per row, "
        "times uses).",
    )
    max_loras: int = Field(256, ge=1, description="Adapters resident at once, the base model included.")
    merged_adapter: str = Field(
        "",
        description="Path of an adapter (PEFT folder or card) to merge into the weights at start. The engine then "
        "serves this adapter only and rejects others and the base model. docs/reference/performance.md shows when "
        "it is faster.",
    )
    max_num_batched_tokens: int = Field(
        256, ge=8, description="Tokens computed per step: decode tokens plus prefill chunks."
    )
    target_step_ms: int = Field(
        100,
        ge=0,
        description="While sequences decode, a step gets as many prompt tokens as keep it at about this time, or at "
        "twice the time of decoding alone if that is longer. 0: as many as max_num_batched_tokens allows.",
    )
    max_tenant_slowdown: float = Field(
        1.5,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="While several tenants run, a step takes at most so many times as long as without the tenants "
        "that run most sequences. Those lose throughput, but get no fewer tokens than the others. 0: no bound; "
        "else at least 1.",
    )
    max_num_seqs: int = Field(64, ge=1, description="Sequences running at once.")
    max_queued_requests: int = Field(
        512, ge=1, description="Waiting requests beyond which new ones are rejected with 429."
    )
    max_model_len: int = Field(0, ge=0, description="Most tokens of prompt plus answer; 0: the model's own limit.")
    lora_load_bytes_per_step: int = Field(
        16 << 20,
        ge=1,
        description="Adapter bytes written per step while sequences run, so that many cold adapters cannot stall "
        "streams.",
    )
    max_step_s: float = Field(
        30.0,
        gt=0,
        description="A step that takes longer than this, and 50 times longer than usual, hangs: its replica is "
        "replaced. Not with skip_precompile, where a step may compile.",
    )
    enable_prefix_caching: bool = Field(
        True, description="Reuse KV blocks of equal prefixes (same adapter, same tenant salt)."
    )
    speculative_decoding: Speculation = Field(
        "auto",
        description="Verify draft tokens (from the prompt and the answer so far, a grammar or a `prediction`) in the "
        "step that draws the next token; answers keep their bits. auto: with cpu, while few sequences run and draft "
        f"tokens are accepted; off; or 1 to {MAX_DRAFT_TOKENS}, cpu only: always so many draft tokens.",
    )

    @property
    def device(self) -> DeviceConfig:
        """The one section that is set."""
        device = self.cpu or self.cuda or self.xla or self.vllm
        assert device is not None, "validation sets a section where there is none"
        return device

    @property
    def compute(self) -> Compute:
        """The arithmetic of the base model's products."""
        return self.cpu.compute if self.cpu is not None else "float32"

    @property
    def arithmetic(self) -> str:
        """What answers are computed in, a part of the base model's digest: `compute`, and weights and KV that round."""
        parts: list[str] = [self.compute]
        if self.cpu is not None and self.cpu.weight_dtype == "int8":
            parts.append("weights in int8")
        if self.cpu is not None and self.cpu.kv_cache_dtype == "bfloat16":
            parts.append("KV in bfloat16")
        return ", ".join(parts)

    @property
    def rank_alignment(self) -> int:
        """An adapter takes at most its largest rank, rounded up to this times a power of two, in rank rows."""
        return self.vllm.max_lora_rank if self.vllm is not None else self.device.rank_alignment

    @property
    def step_limit_s(self) -> float:
        """`max_step_s`, or infinity where a step may compile."""
        return math.inf if getattr(self.device, "skip_precompile", False) else self.max_step_s

    @property
    def max_rank(self) -> int:
        """The largest rank that an adapter may have; runs of rank rows are powers of two in units of the alignment."""
        if self.vllm is not None:
            return self.vllm.max_lora_rank
        units = self.lora_pool_rows // self.rank_alignment if self.max_loras > 1 else 0
        return self.rank_alignment << (units.bit_length() - 1) if units else 0

    def section(self, kind: type[_SectionT]) -> _SectionT:
        """The section of this kind; ConfigError if another one is set."""
        device = self.device
        if not isinstance(device, kind):
            raise ConfigError(f"engine.{device.name} is set, but this engine reads engine.{kind.name}")
        return device

    def on(self, device: DeviceConfig) -> EngineConfig:
        """The same shared settings on this device."""
        left_out = {*_SECTIONS, *(_NOT_VLLM if device.name == "vllm" or self.vllm is not None else ())}
        shared = {name: value for name, value in self if name not in left_out}
        return EngineConfig(**shared, **{device.name: device})

    def check_installed(self) -> None:
        """Raise ConfigError if a package, or vLLM's interpreter, that the section needs is not installed."""
        device = self.device
        if isinstance(device, VllmConfig) and shutil.which(device.python) is None:
            raise ConfigError(
                f"engine.vllm.python is {device.python!r}, which is no program; name the interpreter of an environment "
                "that contains vLLM (docs/how-to/gpu.md)"
            )
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
        if found == ["vllm"]:
            return _of_vllm(values)
        return values if found else {**values, "cpu": {}}

    @field_validator("speculative_decoding", mode="before")
    @classmethod
    def _off_in_yaml(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads off as false

    @field_validator("merged_adapter")
    @classmethod
    def _reject_auto_merge(cls, value: str) -> str:
        if value == "auto":
            raise ValueError(
                "engine.merged_adapter is 'auto', but merging is not chosen automatically: a merged engine rejects the "
                "base and every other adapter. Name the adapter's path (merging is faster for one adapter and a base "
                "in float32) or leave it out; docs/reference/performance.md has measurements of both"
            )
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.speculative_decoding, int) and self.cpu is None:
            raise ValueError(
                f"engine.speculative_decoding is {self.speculative_decoding}, but engine.{self.device.name} cannot "
                "verify draft tokens with the bits of drawing them one by one; set auto or off, or use engine.cpu"
            )
        if 0 < self.max_tenant_slowdown < 1:
            raise ValueError(
                f"engine.max_tenant_slowdown is {self.max_tenant_slowdown}, but must be at least 1, or 0 for no bound"
            )
        if self.num_kv_blocks < 2 and not (self.cuda and self.num_kv_blocks == 0):
            raise ValueError(
                f"num_kv_blocks is {self.num_kv_blocks}; at least 2 are needed (0, as many as fit, is for engine.cuda)"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_other_sections(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit sections that are not set, so that the output can be read again."""
        left_out = {name for name in _SECTIONS if getattr(self, name) is None}
        left_out |= _NOT_VLLM.keys() if self.vllm is not None else set()
        return {key: value for key, value in serialize(self).items() if key not in left_out}


def _of_vllm(values: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's settings with vLLM's slots as rank rows. ValueError for settings that vLLM has its own of."""
    for name, instead in _NOT_VLLM.items():
        if name in values:
            hint = f"; see {instead}" if instead else ""
            raise ValueError(f"engine.{name} has no effect on engine.vllm: leave it out{hint}")
    try:
        section = VllmConfig.model_validate(values["vllm"])
    except ValidationError:
        return dict(values)  # reported with the section's name, as its own error
    rows = section.max_loras * section.max_lora_rank
    sizes = {"lora_pool_rows": rows, "max_loras": section.max_loras + 1, "extra_weights_bytes": 1 << 40}  # no limit
    return {**values, **sizes}
