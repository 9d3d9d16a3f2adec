"""vLLM's worker extension on CPUs: tokens of the base model get no adapter.

In a batch with adapters, vLLM 0.32's CPU operations use a token's slot as an index; the base's is -1: the last slot.
Importing this module, which vLLM does in each process that computes, corrects them. Like `worker.py` it runs in vLLM's
environment.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

_shrink = lora_ops.bgmv_shrink


def _bgmv_shrink(inputs: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0) -> None:
    """output[t] = scaling * A[slots[t]] @ inputs[t], and zeros where the slot is -1."""
    _shrink(inputs, weights, output, slots, scaling)
    output[: slots.shape[0]][slots < 0] = 0


lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = _bgmv_shrink


class CpuLora:
    """vLLM imports this module for a class; it adds nothing to vLLM's own."""
