"""The memory plan of a device: weights, LoRA pool, extra weights, working space, and KV blocks from the remainder.

Everything here is arithmetic; nothing is allocated. A `MemoryPlan` prints as the report logged at start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.engine.config import CudaConfig, EngineConfig
from app.engine.errors import OutOfDeviceMemory
from app.engine.models.linear_modules import LinearModule, layer_linear_modules
from app.engine.models.memory_estimate import kv_block_bytes, num_weights, rank_row_bytes
from app.engine.models.spec import ModelSpec
from app.kernels.lora_rows import START_MULTIPLE

#: Rank rows are counted in multiples of this: what a tensor core multiplies at a time.
RANK_ALIGNMENT = 16
#: Bytes per logit while tokens are drawn: the logits, probabilities, their sorted copy, and integer sums of both.
_SAMPLING_BYTES_PER_LOGIT = 48
#: Code, streams, cuBLAS workspaces and fragmentation.
_FIXED_BYTES = 768 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose; `budget_bytes` bounds their sum."""

    budget_bytes: int
    weight_bytes: int
    rank_row_bytes: int
    extra_bytes: int
    working_bytes: int
    kv_block_bytes: int
    num_kv_blocks: int
    lora_pool_rows: int

    @property
    def kv_bytes(self) -> int:
        return self.kv_block_bytes * self.num_kv_blocks

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.rank_row_bytes + self.extra_bytes + self.working_bytes + self.kv_bytes

    def __str__(self) -> str:
        return (
            f"weights {_size(self.weight_bytes)}, {self.lora_pool_rows} rank rows {_size(self.rank_row_bytes)}, "
            f"extra weights up to {_size(self.extra_bytes)}, working space {_size(self.working_bytes)}, "
            f"{self.num_kv_blocks} KV blocks {_size(self.kv_bytes)}: {_size(self.total_bytes)} of "
            f"{_size(self.budget_bytes)}"
        )


def rank_row_size(spec: ModelSpec) -> int:
    """Numbers of one rank row, rounded up so that an adapter's first matrix may begin at any row."""
    return -(-rank_row_bytes(spec, 1) // START_MULTIPLE) * START_MULTIPLE


def plan_memory(
    spec: ModelSpec, config: EngineConfig, *, device_bytes: int, free_bytes: int, element_bytes: int
) -> MemoryPlan:
    """Divide the budget. `device_bytes`: the device's total; `free_bytes`: what other processes leave of it.

    Raises OutOfDeviceMemory if the budget exceeds the free memory or the configured sizes exceed the budget.
    """
    cuda = config.section(CudaConfig)
    budget = cuda.memory_bytes or int(device_bytes * cuda.gpu_memory_utilization)
    if budget > free_bytes:
        raise OutOfDeviceMemory(
            f"the memory budget is {_size(budget)} but {_size(free_bytes)} of the device's {_size(device_bytes)} are "
            "free; lower engine.cuda.gpu_memory_utilization or engine.cuda.memory_bytes, or stop other processes there"
        )
    rows = config.lora_pool_rows // RANK_ALIGNMENT * RANK_ALIGNMENT
    block_bytes = kv_block_bytes(spec, config.block_size, element_bytes)
    plan = MemoryPlan(
        budget_bytes=budget,
        weight_bytes=element_bytes * num_weights(spec),
        rank_row_bytes=rows * rank_row_size(spec) * element_bytes,
        extra_bytes=config.extra_weights_bytes if rows else 0,
        working_bytes=_working_bytes(spec, config, element_bytes),
        kv_block_bytes=block_bytes,
        num_kv_blocks=config.num_kv_blocks,
        lora_pool_rows=rows,
    )
    if config.num_kv_blocks == 0:
        plan = replace(plan, num_kv_blocks=max(0, budget - plan.total_bytes) // block_bytes)
        if plan.num_kv_blocks < 2:
            raise OutOfDeviceMemory(
                f"no memory is left for KV blocks of {_size(block_bytes)} each: {plan}; raise "
                "engine.cuda.gpu_memory_utilization or lower engine.lora_pool_rows, extra_weights_bytes or "
                "max_num_batched_tokens"
            )
    if plan.total_bytes > budget:
        raise OutOfDeviceMemory(
            f"the configured sizes do not fit: {plan}; lower engine.num_kv_blocks (0 takes as many as fit), "
            "lora_pool_rows, extra_weights_bytes or max_num_batched_tokens, or raise engine.cuda.gpu_memory_utilization"
        )
    return plan


def _working_bytes(spec: ModelSpec, config: EngineConfig, element_bytes: int) -> int:
    """Activations of one layer for the largest step, logits, rotary tables and the fixed part."""
    widths = [_numbers_per_token(spec, layer) for layer in range(len(spec.layers))]
    activations = config.max_num_batched_tokens * max(widths) * element_bytes
    logits = config.max_num_seqs * spec.vocab_size * _SAMPLING_BYTES_PER_LOGIT
    ropes = {layer.attention.rope for layer in spec.layers}
    angles = spec.max_positions * sum(8 * len(rope.inv_freq) for rope in ropes)
    return 2 * activations + logits + angles + _FIXED_BYTES


def _numbers_per_token(spec: ModelSpec, layer: int) -> int:
    """Activations of one layer per token.

    Twice the size of q, k and v (or of queries and latents), sums of latents by head, three times that of gate, and
    inputs and outputs.
    """
    modules = {module.name: module for module in layer_linear_modules(spec, layer)}
    count = 4 * spec.hidden_size
    count += sum(
        2 * modules[name].width() for name in ("qkv", "query", "query_a", "query_b", "latent_a") if name in modules
    )
    attention = spec.layers[layer].attention
    if attention.latent is not None:
        count += attention.num_heads * (2 * attention.latent.kv_rank + attention.latent.value_size)
    for name, module in modules.items():
        if name.endswith("gate_up"):
            count += 3 * module.widths[0] * _uses(spec, layer, module)
        elif name in ("experts_down", "shared_down"):
            count += module.width() * _uses(spec, layer, module)
    return count


def _uses(spec: ModelSpec, layer: int, module: LinearModule) -> int:
    """How many times a token passes the module: once, or through each of its chosen experts."""
    mixture = spec.layers[layer].experts
    return 1 if module.num_experts is None or mixture is None else mixture.router.top_k


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / (1 << 20):.1f} MiB"
