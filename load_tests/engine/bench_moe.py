"""Decoding speed of a mixture of experts on the CPU, beside transformers and PEFT, in one run.

In: sizes of a Qwen3-MoE with random weights, numbers of streams. Out: a Markdown table on stdout. Adapters are random,
over attention and a share of the experts, in PEFT's layout; PEFT runs one of them for all streams, for it mixes none.
Rounds are interleaved (`measuring.py`), ratios are taken within a round, and first tokens are compared, so that nobody
is fast by computing something else.

    python -m load_tests.engine.bench_moe --hidden 1024 --layers 4 --experts 64 --top-k 6 --streams 1,8,32
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import PeftModel
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from app.engine.adapters.formats.peft import read_peft
from app.engine.config import CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.spec import ModelSpec
from app.engine.open import load_backend
from load_tests.decoding import Decoder, EngineDecoder
from load_tests.engine.reference import TransformersDecoder, load_transformers
from load_tests.measuring import environment, numbers, ratios, rounds, spread

ENGINE, TRANSFORMERS, PEFT = "engine", "transformers", "PEFT, one adapter"


class Case(NamedTuple):
    """Who decodes, with how many adapters over the streams, and how many streams."""

    system: str
    num_adapters: int
    num_streams: int


@dataclass(frozen=True)
class Settings:
    """The command line."""

    hidden: int
    layers: int
    experts: int
    top_k: int
    expert_size: int
    streams: tuple[int, ...]
    num_adapters: int
    rank: int
    num_prompt_tokens: int
    num_tokens: int
    num_rounds: int
    num_threads: int
    seed: int


def write_model(settings: Settings, folder: Path) -> Path:
    """A Qwen3-MoE of random weights as transformers saves it."""
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=settings.hidden, intermediate_size=settings.expert_size,
        moe_intermediate_size=settings.expert_size, num_hidden_layers=settings.layers,
        num_attention_heads=max(settings.hidden // 64, 1), num_key_value_heads=max(settings.hidden // 256, 1),
        head_dim=64, num_experts=settings.experts, num_experts_per_tok=settings.top_k, norm_topk_prob=True,
        max_position_embeddings=1024, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write_adapter(folder: Path, spec: ModelSpec, rank: int, seed: int) -> Path:
    """Attention and all experts of every layer, as PEFT 0.21 lays them out; lora_alpha equals the rank."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}

    def add(path: str, count: int, d_in: int, d_out: int) -> None:
        name = f"base_model.model.{path}"
        tensors[f"{name}.lora_A.weight"] = rng.standard_normal((count * rank, d_in), np.float32) * d_in**-0.5
        tensors[f"{name}.lora_B.weight"] = rng.standard_normal((d_out, count * rank), np.float32) * 0.05 * rank**-0.5

    for index, layer in enumerate(spec.layers):
        assert layer.experts is not None, "every layer of the model has experts"
        prefix, count, wide = f"model.layers.{index}", layer.experts.router.num_experts, layer.mlp.intermediate_size
        attention, hidden = layer.attention, spec.hidden_size
        q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        for target, sizes in {"q_proj": (hidden, q), "v_proj": (hidden, kv), "o_proj": (q, hidden)}.items():
            add(f"{prefix}.self_attn.{target}", 1, *sizes)
        add(f"{prefix}.mlp.experts.base_layer", count, hidden, 2 * wide)
        add(f"{prefix}.mlp.experts", count, wide, hidden)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
        "base_model_name_or_path": spec.name, "target_modules": ["q_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "peft_version": "0.21.2",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def decoders(settings: Settings, folder: Path) -> dict[str, Decoder]:
    """Everybody who is measured, loaded."""
    model = write_model(settings, folder / "model")
    checkpoint = load_checkpoint(model)
    folders = [
        write_adapter(folder / f"a{index}", checkpoint.spec, settings.rank, settings.seed + index)
        for index in range(settings.num_adapters)
    ]
    adapters = [read_peft(path, checkpoint.spec) for path in folders]
    most, length = max(settings.streams), settings.num_prompt_tokens + settings.num_tokens
    config = EngineConfig(
        adapter_rank_rows=max(64, 2 * settings.num_adapters * max(8, settings.rank)),
        max_adapter_slots=settings.num_adapters + 1,
        adapter_extra_bytes=sum(adapter.card.extra_bytes for adapter in adapters),
        num_kv_blocks=most * (-(-length // 16) + 1), max_batch_sequences=most, max_context=length, prefix_cache=False,
        speculation="off",
    ).on(CpuConfig(num_threads=settings.num_threads))  # fmt: skip
    reference: Any = load_transformers(model)
    found: dict[str, Decoder] = {
        ENGINE: EngineDecoder(Engine(load_backend(checkpoint, config), config), adapters),
        TRANSFORMERS: TransformersDecoder(reference),
    }
    if folders:
        found[PEFT] = _PeftDecoder(load_transformers(model), folders[0])
    return found


class _PeftDecoder(TransformersDecoder):
    """The first adapter for every stream."""

    def __init__(self, model: Any, folder: Path) -> None:
        super().__init__(PeftModel.from_pretrained(model, str(folder)).eval())

    def decode(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int | None], num_tokens: int) -> Any:  # noqa: ARG002
        return super().decode(prompts, [None] * len(prompts), num_tokens)


def run(settings: Settings) -> str:
    """Measure everything; returns the Markdown."""
    torch.set_num_threads(settings.num_threads or torch.get_num_threads())
    tokens: dict[Case, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        found = decoders(settings, Path(folder))
        rng = np.random.default_rng(settings.seed)
        prompts = rng.integers(3, 4096, (max(settings.streams), settings.num_prompt_tokens)).tolist()

        def measure(case: Case) -> float:
            n, a = case.num_streams, case.num_adapters
            decoded = found[case.system].decode(
                prompts[:n], [i % a if a else None for i in range(n)], settings.num_tokens
            )
            tokens[case] = [row[0] for row in decoded.token_ids]
            return decoded.tokens_per_s

        cases = []
        for n in settings.streams:
            cases += [Case(ENGINE, 0, n), Case(TRANSFORMERS, 0, n)]
            if settings.num_adapters:
                cases += [Case(ENGINE, settings.num_adapters, n), Case(ENGINE, 1, n), Case(PEFT, 1, n)]
        values = rounds({case: partial(measure, case) for case in dict.fromkeys(cases)}, settings.num_rounds)
    for n in settings.streams:
        for a, system in ((0, TRANSFORMERS), (1, PEFT)):
            if Case(system, a, n) in tokens and tokens[Case(ENGINE, a, n)] != tokens[Case(system, a, n)]:
                raise SystemExit(f"{system} and the engine chose other first tokens for {n} streams")
    return report(settings, values)


def report(settings: Settings, values: dict[Case, list[float]]) -> str:
    """Tokens per second, and ratios within rounds."""
    lines = ["| streams | who | adapters | tokens/s | ratio |", "|---|---|---|---|---|"]
    for case, found in values.items():
        n = case.num_streams
        against = None
        if case.system == ENGINE:
            if case.num_adapters == 0:
                against = Case(TRANSFORMERS, 0, n)
            elif case.num_adapters == 1 and Case(PEFT, 1, n) in values:
                against = Case(PEFT, 1, n)
            if case.num_adapters > 1:
                against = Case(ENGINE, 0, n)
        ratio = f"{ratios(found, values[against])} of {against.system}" if against else ""
        lines.append(f"| {n} | {case.system} | {case.num_adapters} | {spread(found)} | {ratio} |")
    return "\n".join([f"{settings}", f"{environment()}", "", *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Decoding speed of a mixture of experts.")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--expert-size", type=int, default=704)
    parser.add_argument("--streams", type=numbers, default=(1, 8, 32))
    parser.add_argument("--adapters", dest="num_adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--prompt-tokens", dest="num_prompt_tokens", type=int, default=16)
    parser.add_argument("--tokens", dest="num_tokens", type=int, default=24)
    parser.add_argument("--rounds", dest="num_rounds", type=int, default=3)
    parser.add_argument("--threads", dest="num_threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    print(run(Settings(**vars(parser.parse_args(argv)))))


if __name__ == "__main__":
    main()
