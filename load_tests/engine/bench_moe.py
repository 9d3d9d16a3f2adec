"""Decoding speed of a mixture of experts on the CPU, compared with transformers and PEFT, in one run.

Prints tokens per second, CPU time per token, and the engine's step over the cost of its bytes: those of the experts
that the step uses, and of everything that every token reads. The model is a Qwen3-MoE with random weights. Adapters are
random, over attention and all experts, in PEFT's layout; PEFT runs one of them for all streams, because it cannot mix
them. vLLM takes part with the base where an environment has it (`--vllm PYTHON`, its CPU build). Rounds are interleaved
(`stats.py`), ratios are taken within a round, and tokens are compared, so that no system is fast by computing something
else.

    python -m load_tests.engine.bench_moe --hidden 1024 --layers 2 --experts 64 --top-k 6 --streams 1,8,32
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import sys
import tempfile
import time
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

from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.linear_modules import layer_linear_modules
from app.engine.models.spec import ModelSpec
from load_tests.decoding import Decoder, EngineDecoder
from load_tests.engine.reference import TransformersDecoder, load_transformers
from load_tests.engine.vllm_reference import VllmDecoder
from load_tests.stats import environment, numbers, ratios, rounds, spread

ENGINE, TRANSFORMERS, PEFT, VLLM = "engine", "transformers", "PEFT, one adapter", "vLLM, eager"
#: The rate of torch's sum over `_READ_BYTES` bytes, the median of a few.
BANDWIDTH = "bandwidth"
_READ_BYTES = 256 << 20


class Case(NamedTuple):
    """A measurement: the system, the number of adapters over the streams, the number of streams."""

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
    num_reference_tokens: int
    num_rounds: int
    num_threads: int
    seed: int
    vllm: Path | None = None


def write_model(settings: Settings, folder: Path) -> Path:
    """A Qwen3-MoE of random weights as transformers saves it."""
    head_dim: dict[str, Any] = {"head_dim": 64}  # transformers takes it without naming it
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=settings.hidden, intermediate_size=settings.expert_size,
        moe_intermediate_size=settings.expert_size, num_hidden_layers=settings.layers,
        num_attention_heads=max(settings.hidden // 64, 1), num_key_value_heads=max(settings.hidden // 256, 1),
        num_experts=settings.experts, num_experts_per_tok=settings.top_k, norm_topk_prob=True,
        max_position_embeddings=1024, initializer_range=0.05, **head_dim,
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


def decoders(settings: Settings, folder: Path, closing: contextlib.ExitStack) -> dict[str, Decoder]:
    """All systems, loaded; `closing` gets what has to be closed."""
    model = write_model(settings, folder / "model")
    checkpoint = load_checkpoint(model)
    folders = [
        write_adapter(folder / f"a{index}", checkpoint.spec, settings.rank, settings.seed + index)
        for index in range(settings.num_adapters)
    ]
    adapters = [read_adapter(path, checkpoint.spec) for path in folders]
    most, length = max(settings.streams), settings.num_prompt_tokens + settings.num_tokens
    config = EngineConfig(
        lora_pool_rows=max(64, 2 * settings.num_adapters * max(8, settings.rank)),
        max_loras=settings.num_adapters + 1,
        extra_weights_bytes=sum(adapter.card.extra_bytes for adapter in adapters),
        num_kv_blocks=most * (-(-length // 16) + 1), max_num_seqs=most, max_model_len=length,
        enable_prefix_caching=False,
        max_num_batched_tokens=max(256, most * settings.num_prompt_tokens), target_step_ms=0,  # streams start together
        speculative_decoding="off",
    ).on(CpuConfig(num_threads=settings.num_threads))  # fmt: skip
    reference: Any = load_transformers(model)
    found: dict[str, Decoder] = {
        ENGINE: EngineDecoder(Engine(load_backend(checkpoint, config), config), adapters),
        TRANSFORMERS: _CountingDecoder(reference, checkpoint.spec),
    }
    if folders:  # modules of its own over the same weights: PEFT rewrites the modules that it is given
        weights = {id(parameter): parameter for parameter in reference.parameters()}
        found[PEFT] = _PeftDecoder(copy.deepcopy(reference, weights), folders[0])
    if settings.vllm is not None:
        vllm = VllmDecoder(
            settings.vllm, model, [], max_rank=settings.rank, max_streams=most, max_length=length, compiled=False
        )
        closing.callback(vllm.close)
        found[VLLM] = vllm
    return found


class _CountingDecoder(TransformersDecoder):
    """Also counts the experts that its steps use."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        super().__init__(model)
        self._routers = [layer.mlp.gate for layer in model.model.layers]
        self._spec = spec

    def step_bytes(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Bytes that a step decoding these prompts reads on average: its experts once each, and every other module."""
        used: list[int] = []

        def count(_module: Any, _inputs: Any, output: Any) -> None:
            if len(output[2]) == len(prompts):  # one token each: a step, not the prompts
                used.append(len(output[2].unique()))

        hooks = [router.register_forward_hook(count) for router in self._routers]
        self.decode(prompts, [None] * len(prompts), num_tokens)
        for hook in hooks:
            hook.remove()
        return _bytes_of(self._spec, float(np.mean(used)))


def _bytes_of(spec: ModelSpec, num_experts: float) -> float:
    """Bytes of one step in float32 with `num_experts` experts of each layer, without caches."""
    total: float = spec.vocab_size * spec.hidden_size
    for layer in range(len(spec.layers)):
        for module in layer_linear_modules(spec, layer):
            total += module.d_in * module.width() * (1 if module.num_experts is None else num_experts)
    return 4.0 * total


class _PeftDecoder(TransformersDecoder):
    """PEFT's decoder, with the first adapter for every stream."""

    def __init__(self, model: Any, folder: Path) -> None:
        super().__init__(PeftModel.from_pretrained(model, str(folder)).eval())

    def decode(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int | None], num_tokens: int) -> Any:  # noqa: ARG002
        return super().decode(prompts, [None] * len(prompts), num_tokens)


class Measurement(NamedTuple):
    """One case in one round. CPU time of this process; NaN for vLLM, which has processes of its own."""

    tokens_per_s: float
    cpu_ms_per_token: float


def run(settings: Settings) -> str:
    """Measure everything; returns the Markdown."""
    torch.set_num_threads(settings.num_threads or torch.get_num_threads())
    tokens: dict[Case, list[tuple[int, ...]]] = {}
    measured: dict[Case, list[Measurement]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        found = decoders(settings, Path(folder), closing)
        rng = np.random.default_rng(settings.seed)
        prompts = rng.integers(3, 4096, (max(settings.streams), settings.num_prompt_tokens)).tolist()
        memory = torch.zeros(_READ_BYTES // 4)

        def measure(case: Case) -> float:
            n, a = case.num_streams, case.num_adapters
            count = settings.num_tokens if case.system == ENGINE else settings.num_reference_tokens
            before = time.process_time()
            decoded = found[case.system].decode(prompts[:n], [i % a if a else None for i in range(n)], count)
            cpu_ms = (time.process_time() - before) * 1e3 / (n * count)
            tokens[case] = [row[: settings.num_reference_tokens] for row in decoded.token_ids]
            cpu_ms = math.nan if case.system == VLLM else cpu_ms
            measured.setdefault(case, []).append(Measurement(decoded.tokens_per_s, cpu_ms))
            print(case, measured[case][-1], file=sys.stderr)  # a run takes minutes
            return decoded.tokens_per_s

        counting: Any = found[TRANSFORMERS]
        num_bytes = {n: counting.step_bytes(prompts[:n], settings.num_reference_tokens) for n in settings.streams}
        cases = _cases(settings)
        for case in cases:
            if case.system == ENGINE:  # the others' first forward is the prompts', which is not timed
                measure(case)
        measured.clear()
        values = rounds(
            {BANDWIDTH: lambda: _bandwidth(memory)} | {case: partial(measure, case) for case in cases},
            settings.num_rounds,
        )
    _check_tokens(settings, tokens)
    return report(settings, measured, values[BANDWIDTH], num_bytes)


def _cases(settings: Settings) -> list[Case]:
    cases = []
    for n in settings.streams:
        cases += [Case(ENGINE, 0, n), Case(TRANSFORMERS, 0, n)]
        cases += [Case(VLLM, 0, n)] if settings.vllm is not None else []
        if settings.num_adapters:
            cases += [Case(ENGINE, settings.num_adapters, n), Case(ENGINE, 1, n), Case(PEFT, 1, n)]
    return list(dict.fromkeys(cases))


def _bandwidth(memory: torch.Tensor) -> float:
    """Bytes per second."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - started)
    return memory.nbytes / float(np.median(times))


def _check_tokens(settings: Settings, tokens: dict[Case, list[tuple[int, ...]]]) -> None:
    """SystemExit where a reference has other first tokens."""
    for n in settings.streams:
        for a, system in ((0, TRANSFORMERS), (0, VLLM), (1, PEFT)):
            theirs, ours = tokens.get(Case(system, a, n)), tokens.get(Case(ENGINE, a, n))
            if theirs is not None and ours is not None and [row[0] for row in theirs] != [row[0] for row in ours]:
                raise SystemExit(f"{system} and the engine chose other first tokens for {n} streams")


def report(
    settings: Settings,
    measured: dict[Case, list[Measurement]],
    bandwidth: Sequence[float],
    num_bytes: dict[int, float],
) -> str:
    """Tokens per second and CPU time, and ratios within rounds; then the base's step over its bytes."""
    lines = [
        "| streams | system | adapters | tokens/s | ratio | CPU ms/token | CPU ratio |",
        "|---:|---|---:|---:|---|---:|---:|",
    ]
    for case, found in measured.items():
        against = _reference(case)
        speed, cpu = [one.tokens_per_s for one in found], [one.cpu_ms_per_token for one in found]
        ratio, cpu_ratio, cpu_ms = "", "", ""
        if against != case and against in measured:
            theirs = measured[against]
            ratio = f"{ratios(speed, [one.tokens_per_s for one in theirs])} of {against.system}"
        if case.system != VLLM:
            cpu_ms = f"{spread(cpu).median:.1f}"
            if ratio:
                cpu_ratio = f"{ratios(cpu, [one.cpu_ms_per_token for one in theirs]).median:.2f}"
        lines.append(
            f"| {case.num_streams} | {case.system} | {case.num_adapters} | {spread(speed).median:.1f} | {ratio} | "
            f"{cpu_ms} | {cpu_ratio} |"
        )
    lines += ["", "| streams | MB of a step | step / its bytes at the memory's rate |", "|---:|---:|---:|"]
    for n, size in num_bytes.items():
        steps = [n / one.tokens_per_s for one in measured[Case(ENGINE, 0, n)]]
        over = spread([step * rate / size for step, rate in zip(steps, bandwidth, strict=True)])
        lines.append(f"| {n} | {size / 1e6:.0f} | {over} |")
    rate = f"memory {spread(bandwidth).median / 1e9:.1f} GB/s"
    return "\n".join([f"{settings}", f"{environment()}, {rate}", "", *lines])


def _reference(case: Case) -> Case:
    """The case to compare with: with several adapters, and for vLLM, the engine's base; else the library that computes
    the same.
    """
    if case.num_adapters > 1 or case.system == VLLM:
        return Case(ENGINE, 0, case.num_streams)
    return Case(PEFT if case.num_adapters else TRANSFORMERS, case.num_adapters, case.num_streams)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Decoding speed of a mixture of experts.")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--expert-size", type=int, default=704)
    parser.add_argument("--streams", type=numbers, default=(1, 8, 32))
    parser.add_argument("--adapters", dest="num_adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--prompt-tokens", dest="num_prompt_tokens", type=int, default=16)
    parser.add_argument("--tokens", dest="num_tokens", type=int, default=24)
    parser.add_argument("--reference-tokens", dest="num_reference_tokens", type=int, default=6)
    parser.add_argument("--rounds", dest="num_rounds", type=int, default=3)
    parser.add_argument("--threads", dest="num_threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM, to measure it with the base")
    print(run(Settings(**vars(parser.parse_args(argv)))))


if __name__ == "__main__":
    main()
