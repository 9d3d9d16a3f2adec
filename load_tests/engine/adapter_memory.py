"""Bytes that adapters take in an engine on the CPU, compared with a table with room for every expert in every slot.

Prints a Markdown table for Llama 3.1 8B, SmolLM2-135M and DeepSeek-V2-Lite. Adapters' values are never written, so that
the largest fits any machine; every number comes from the engine's own accounting: rank rows by its runs, the rest by
`extra_bytes`. The table also gives the size of the rank rows on a device where an adapter begins at one place in the
tables of all modules.

    python -m load_tests.engine.adapter_memory
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.extra_weights import extra_bytes
from app.engine.cpu.adapter_layout import AdapterLayoutCache, row_bytes
from app.engine.models.hf.config import spec_from_config
from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import ModelSpec
from app.engine.pools.adapter_pool import rows_of
from app.kernels.sgmv.cpu import RANK_PANEL

_YARN = {"rope_type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    },
    "Llama 3.1 8B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 163840, "rope_parameters": {**_YARN, "original_max_position_embeddings": 4096},
    },
}  # fmt: skip


class Case(NamedTuple):
    """Which modules an adapter changes. experts: of how many experts of each layer; 0 of a dense model."""

    model: str
    name: str
    targets: tuple[str, ...]  # none: every linear module but the router
    experts: int = 0
    rank: int = 16


CASES = (
    Case("SmolLM2-135M", "q and v", ("q_proj", "v_proj")),
    Case("SmolLM2-135M", "every linear module", (), rank=8),
    Case("SmolLM2-135M", "every linear module", ()),
    Case("SmolLM2-135M", "every linear module", (), rank=64),
    Case("Llama 3.1 8B", "q and v", ("q_proj", "v_proj")),
    Case("Llama 3.1 8B", "every linear module", (), rank=8),
    Case("Llama 3.1 8B", "every linear module", ()),
    Case("Llama 3.1 8B", "every linear module", (), rank=64),
    Case("DeepSeek-V2-Lite", "every linear module, all 64 experts", (), 64),
    Case("DeepSeek-V2-Lite", "every linear module, 8 of 64 experts", (), 8),
)


class Sizes(NamedTuple):
    """Bytes: of as many rows of every module as the largest rank wants, of the run of rank rows, of these that the
    adapter's modules use, and of its extra weights."""

    every_module: int
    rank_rows: int
    used: int
    extra: int


def sizes(case: Case, spec: ModelSpec, dtype: Any) -> Sizes:
    """What an adapter of this kind takes, saved as `dtype`. A rank row is in float32 whatever it was saved in."""
    adapter, row = adapter_of(case, spec, dtype), row_bytes(spec)
    found = AdapterLayoutCache(spec).of(adapter)
    run = rows_of(found.num_rows, alignment=1)
    return Sizes(rows_of(case.rank, RANK_PANEL) * row, run * row, found.packing.num_bytes, extra_bytes(adapter, spec))


def adapter_of(case: Case, spec: ModelSpec, dtype: Any) -> LoraAdapter:
    """An adapter whose values are never read: untouched memory."""
    pairs = dict(_pairs(case, spec, dtype))
    size_bytes = sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values())
    return LoraAdapter(AdapterCard(case.name, "", case.rank, case.targets, str(np.dtype(dtype)), size_bytes), pairs)


def _pairs(case: Case, spec: ModelSpec, dtype: Any) -> Iterator[tuple[LoraKey, LoraPair]]:
    for layer in range(len(spec.layers)):
        for module in layer_linear_modules(spec, layer):
            if module.name == "router":
                continue
            experts = module.experts if module.num_experts is None else module.experts[: case.experts]
            for expert in experts:
                shared = np.empty((case.rank, module.d_in), dtype)  # gate's and up's, as PEFT trains one pair for both
                for target, width in zip(module.targets, module.widths, strict=True):
                    if case.targets and target not in case.targets:
                        continue
                    a = shared if expert is not None else np.empty((case.rank, module.d_in), dtype)
                    yield LoraKey(layer, target, expert=expert), LoraPair(a, np.empty((case.rank, width), dtype))


def report() -> str:
    """The table, in megabytes of 10^6."""
    lines = [
        "| base | adapter in bfloat16 | rank | one start for all modules | rank rows | of these used "
        "| experts and heads | in all |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case in CASES:
        spec = spec_from_config(MODELS[case.model], case.model, "")
        found = sizes(case, spec, ml_dtypes.bfloat16)
        lines.append(
            f"| {case.model} | {case.name} | {case.rank} | {found.every_module / 1e6:.1f} MB | "
            f"{found.rank_rows / 1e6:.1f} MB | {found.used / found.rank_rows:.0%} | "
            f"{found.extra / 1e6:.1f} MB | {(found.rank_rows + found.extra) / 1e6:.1f} MB |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    argparse.ArgumentParser(description="What adapters take in an engine on the CPU.").parse_args(argv)
    print(report())


if __name__ == "__main__":
    main()
