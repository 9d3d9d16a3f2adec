"""Decoding speed of the engine alone, compared with transformers, PEFT's mixed batch and vLLM, in one run.

Prints a Markdown table and writes a JSON lines file with the full configuration, every value and every ratio. Adapters
are random, over all seven projections, and the same files for all systems. Rounds are interleaved (`stats.py`); ratios
are taken within a round. Tokens are compared in the same run, so that no system is fast by computing something else.

    python -m load_tests.engine.bench_engine --streams 1,8,32 --adapters 1,8 --ranks 64,32,16,8

vLLM and llama.cpp take part if `--vllm PYTHON` and `--llama-cpp PYTHON` name the Python of an environment that has vLLM
or llama-cpp-python. With `--compute` and `--vllm-dtype`, each computes in its best precision.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import Compute, CpuConfig, CudaConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from load_tests.decoding import Decoder, DecodeResult, EngineDecoder
from load_tests.random_adapters import write_random_adapters
from load_tests.stats import Spread, environment, numbers, ratios, rounds, spread


class Case(NamedTuple):
    """A measurement: the system, the number of adapters that take turns over the streams, the number of streams."""

    system: str
    num_adapters: int
    num_streams: int


class Comparison(NamedTuple):
    """`case` over `reference`, within one round."""

    title: str
    case: Case
    reference: Case


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    model: Path
    streams: tuple[int, ...]
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]
    num_prompt_tokens: int
    num_tokens: int
    num_reference_tokens: int
    num_rounds: int
    seed: int
    num_threads: int
    with_reference: bool
    weight_dtype: Literal["auto", "float32", "int8"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    vllm: Path | None = None
    bf16_adapters: bool = False
    compute: Compute = "float32"
    vllm_dtype: str = "float32"
    llama_cpp: Path | None = None


ENGINE, LORA_OFF, TRANSFORMERS, PEFT = "engine", "engine, LoRA off", "transformers", "PEFT mixed batch"
LLAMA_CPP = "llama.cpp"
#: vLLM's systems, and whether each compiles its model.
VLLM = {"vLLM, eager": False, "vLLM, compiled": True}


def engine_config(settings: Settings, rank_rows: int) -> EngineConfig:
    """KV memory for the largest case, no prefix cache (prompts repeat from round to round)."""
    most = max(settings.streams)
    length = settings.num_prompt_tokens + settings.num_tokens
    shared = EngineConfig(
        lora_pool_rows=rank_rows,
        num_kv_blocks=max(8, most * (-(-length // 16) + 1)),
        max_num_seqs=most,
        max_model_len=length,
        enable_prefix_caching=False,
        speculative_decoding="off",
    )
    if settings.device == "cuda":
        return shared.on(CudaConfig(gpu_memory_utilization=0.4))  # there are two engines
    cpu = CpuConfig(num_threads=settings.num_threads, weight_dtype=settings.weight_dtype, compute=settings.compute)
    return shared.on(cpu)


def decoders(settings: Settings, checkpoint: Checkpoint, folder: Path, closing: ExitStack) -> dict[str, Decoder]:
    """All systems, loaded; `closing` ends processes."""
    most, most_streams = max(settings.adapters, default=0), max(settings.streams)
    folders = write_random_adapters(
        folder, checkpoint.spec, most, settings.ranks, settings.seed, settings.bf16_adapters
    )
    adapters = [read_adapter(path, checkpoint.spec) for path in folders]
    # Ranks are rounded up to powers of two; twice their sum always fits.
    rank_rows = max(64, 2 * sum(max(8, adapter.card.max_rank) for adapter in adapters))
    found: dict[str, Decoder] = {}
    for name, rows, given in ((LORA_OFF, 0, ()), (ENGINE, rank_rows, adapters)):
        config = engine_config(settings, rows)
        found[name] = EngineDecoder(Engine(load_backend(checkpoint, config), config), given)
    if settings.with_reference:
        from load_tests.engine.reference import PeftDecoder, TransformersDecoder, load_transformers

        model = load_transformers(settings.model)
        found[TRANSFORMERS] = TransformersDecoder(model)
        if folders:
            found[PEFT] = PeftDecoder(model, folders)
        if settings.vllm:
            from load_tests.engine.vllm_reference import VllmDecoder, write_model

            written = write_model(model, folder / "model")
            for name, compiled in VLLM.items():
                decoder = VllmDecoder(
                    settings.vllm,
                    written,
                    folders,
                    max_rank=max(settings.ranks),
                    max_streams=most_streams,
                    max_length=settings.num_prompt_tokens + settings.num_tokens,
                    compiled=compiled,
                    dtype=settings.vllm_dtype,
                )
                closing.callback(decoder.close)
                found[name] = decoder
    if settings.llama_cpp:
        from load_tests.engine.llama_cpp_reference import LlamaCppDecoder

        llama_cpp = LlamaCppDecoder(
            settings.llama_cpp,
            settings.model,
            folder / "llama_cpp.log",
            max_streams=most_streams,
            max_length=settings.num_prompt_tokens + settings.num_tokens,
            num_threads=torch.get_num_threads(),
        )
        closing.callback(llama_cpp.close)
        found[LLAMA_CPP] = llama_cpp
    return found


def cases(settings: Settings) -> list[Case]:
    """Neighbours in this list are neighbours in time."""
    listed = []
    for num_streams in settings.streams:
        systems = [LORA_OFF, ENGINE, *_references(settings, 0)]
        listed += [Case(system, 0, num_streams) for system in systems]
        for num_adapters in settings.adapters:
            systems = [ENGINE, *_references(settings, num_adapters)]
            listed += [Case(system, num_adapters, num_streams) for system in systems]
    return listed


def comparisons(settings: Settings) -> list[Comparison]:
    """The ratios to report."""
    listed: list[Comparison] = []
    for n in settings.streams:
        base = Case(ENGINE, 0, n)
        listed.append(Comparison("LoRA on, unused / LoRA off", base, Case(LORA_OFF, 0, n)))
        listed += [Comparison(f"base / {name} base", base, Case(name, 0, n)) for name in _references(settings, 0)]
        for a in settings.adapters:
            plural = f"{a} adapter{'s' if a > 1 else ''}"
            with_adapters = Case(ENGINE, a, n)
            listed.append(Comparison(f"{plural} / base", with_adapters, base))
            listed += [
                Comparison(f"{plural} / {name}, {plural}", with_adapters, Case(name, a, n))
                for name in _references(settings, a)
            ]
    return listed


def _references(settings: Settings, num_adapters: int) -> list[str]:
    """Systems to compare with."""
    listed = [LLAMA_CPP] if settings.llama_cpp and not num_adapters else []
    if settings.with_reference:
        listed += [PEFT if num_adapters else TRANSFORMERS, *(VLLM if settings.vllm else ())]
    return listed


def run(settings: Settings, log: Callable[[dict[str, object]], None]) -> str:
    """Measure everything; `log` gets each line of the JSON file. Returns the Markdown."""
    torch.set_num_threads(settings.num_threads or torch.get_num_threads())
    before = environment()
    log({"kind": "config", **{k: str(v) if isinstance(v, Path) else v for k, v in vars(settings).items()}, **before})
    checkpoint = load_checkpoint(settings.model)
    rng = np.random.default_rng(settings.seed)
    shape = (max(settings.streams), settings.num_prompt_tokens)
    prompts = rng.integers(0, checkpoint.spec.vocab_size, shape).tolist()
    tokens: dict[Case, tuple[tuple[int, ...], ...]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        found = decoders(settings, checkpoint, Path(folder), closing)

        def decode(case: Case, num_tokens: int) -> DecodeResult:
            n, a = case.num_streams, case.num_adapters
            return found[case.system].decode(prompts[:n], [i % a if a else None for i in range(n)], num_tokens)

        def measure(case: Case) -> float:
            is_reference = case.system not in (ENGINE, LORA_OFF)
            decoded = decode(case, settings.num_reference_tokens if is_reference else settings.num_tokens)
            tokens[case] = decoded.token_ids
            log(
                {
                    "kind": "run",
                    **case._asdict(),
                    "tokens_per_s": round(decoded.tokens_per_s, 3),
                    "mean_tokens_per_s": round(decoded.mean_tokens_per_s, 3),
                    "prefill_s": round(decoded.prefill_s, 4),
                }
            )
            return decoded.tokens_per_s

        for case in cases(settings):
            # Compiles, fills caches, makes adapters resident.
            decode(case, settings.num_tokens if case.system in (ENGINE, LORA_OFF) else 2)
        values = rounds({case: partial(measure, case) for case in cases(settings)}, settings.num_rounds)
    after = environment()["load_average"]
    compared = [(c, ratios(values[c.case], values[c.reference])) for c in comparisons(settings)]
    agreed = agreement(tokens, settings)
    for comparison, ratio in compared:
        where = {"case": comparison.case._asdict(), "reference": comparison.reference._asdict()}
        log({"kind": "ratio", "title": comparison.title, **where, **ratio._asdict()})
    log({"kind": "end", "load_average": after, "streams_with_equal_tokens": agreed})
    return "\n\n".join(
        [_header(settings, before, after), _rates(settings, values), _ratios(settings, compared), agreed]
    )


def agreement(tokens: dict[Case, tuple[tuple[int, ...], ...]], settings: Settings) -> str:
    """How many streams have the reference's tokens, over as many tokens as both generated."""
    same = total = 0
    for case, reference in tokens.items():
        if case.system not in (ENGINE, LORA_OFF):
            ours = tokens[Case(ENGINE, case.num_adapters, case.num_streams)]
            length = min(settings.num_tokens, settings.num_reference_tokens)
            same += sum(a[:length] == b[:length] for a, b in zip(ours, reference, strict=True))
            total += len(reference)
    return f"Streams with the same greedy tokens as the reference: {same} of {total}." if total else ""


def _header(settings: Settings, machine: dict[str, object], load_after: object) -> str:
    ranks = ", ".join(map(str, settings.ranks))
    return (
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {load_after}. {settings.num_prompt_tokens} prompt tokens, "
        f"{settings.num_tokens} tokens ({settings.num_reference_tokens} of the references), ranks {ranks} in turn over "
        f"all seven projections in {'bfloat16' if settings.bf16_adapters else 'float32'}, weight_dtype "
        f"{settings.weight_dtype}, compute {settings.compute}, {settings.num_rounds} interleaved rounds."
    )


def _rates(settings: Settings, values: dict[Case, list[float]]) -> str:
    rows = dict.fromkeys((case.system, case.num_adapters) for case in values)
    lines = [
        "| tokens/s, median of the rounds | " + " | ".join(f"{n} streams" for n in settings.streams) + " |",
        "|---|" + "---:|" * len(settings.streams),
    ]
    for system, a in rows:
        cells = [f"{spread(values[Case(system, a, n)]).median:.1f}" for n in settings.streams]
        used = f"{a} adapter{'s' if a > 1 else ''}" if a else "base"
        lines.append(f"| {system}, {used} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratios(settings: Settings, compared: Sequence[tuple[Comparison, Spread]]) -> str:
    lines = [
        "| ratio within a round, median (lowest to highest) | "
        + " | ".join(f"{n} streams" for n in settings.streams)
        + " |",
        "|---|" + "---:|" * len(settings.streams),
    ]
    for title in dict.fromkeys(comparison.title for comparison, _ in compared):
        cells = [str(ratio) for comparison, ratio in compared if comparison.title == title]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Decoding speed of the engine alone, compared with transformers and PEFT."
    )
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--streams", type=numbers, default=(1, 8, 32))
    parser.add_argument("--adapters", type=numbers, default=(1, 8), help="numbers of adapters; the base always runs")
    parser.add_argument("--ranks", type=numbers, default=(64, 32, 16, 8), help="given to the adapters in turn")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--reference-tokens", type=int, default=24, help="fewer, because the references are slow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="for every system; 0 takes every core")
    parser.add_argument("--weight-dtype", choices=("auto", "float32", "int8"), default="auto")
    parser.add_argument("--adapter-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="in their files")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the engine; cuda needs --no-reference"
    )
    parser.add_argument("--no-reference", action="store_true", help="without transformers and PEFT")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM, to measure it too")
    parser.add_argument("--vllm-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compute", choices=get_args(Compute), default="float32", help="engine.cpu.compute")
    parser.add_argument("--llama-cpp", type=Path, help="Python of an environment with llama-cpp-python; needs a GGUF")
    parser.add_argument("--out", type=Path, default=Path("results/bench_engine.jsonl"))
    arguments = parser.parse_args()
    if arguments.vllm and arguments.no_reference:
        parser.error("--vllm measures one more reference; leave out --no-reference")
    if arguments.device != "cpu" and not arguments.no_reference:
        parser.error(f"the references run on the CPU; compare with --device {arguments.device} --no-reference")
    settings = Settings(
        model=resolve_model(arguments.model),
        streams=arguments.streams,
        adapters=arguments.adapters,
        ranks=arguments.ranks,
        num_prompt_tokens=arguments.prompt_tokens,
        num_tokens=arguments.tokens,
        num_reference_tokens=arguments.reference_tokens,
        num_rounds=arguments.rounds,
        seed=arguments.seed,
        num_threads=arguments.threads,
        with_reference=not arguments.no_reference,
        weight_dtype=arguments.weight_dtype,
        device=arguments.device,
        bf16_adapters=arguments.adapter_dtype == "bfloat16",
        vllm=arguments.vllm,
        compute=arguments.compute,
        vllm_dtype=arguments.vllm_dtype,
        llama_cpp=arguments.llama_cpp,
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w") as lines:

        def log(line: dict[str, object]) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        print(run(settings, log))


if __name__ == "__main__":
    main()
