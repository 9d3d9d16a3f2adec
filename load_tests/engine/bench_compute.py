"""Speed of each arithmetic (`engine.cpu.compute`) over float32's: decoding without and with adapters, and a prompt.

One engine for each takes its turn in every round; ratios are taken within a round: the median (lowest to highest).

    python -m load_tests.engine.bench_compute --streams 1,8,32 --adapters 8 --prompt-tokens 1024 --rounds 5
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import Compute, CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.models.weight_stacks import product_form
from load_tests.decoding import EngineDecoder
from load_tests.random_adapters import write_random_adapters
from load_tests.stats import environment, numbers, ratios, rounds, spread

_SHORT_PROMPT = 16


class Case(NamedTuple):
    """What is timed: a prompt (no streams), or streams over a number of adapters."""

    num_streams: int
    num_adapters: int = 0


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    model: Path
    streams: tuple[int, ...] = (1, 8, 32)
    num_adapters: int = 8
    ranks: tuple[int, ...] = (64, 32, 16, 8)
    num_prompt_tokens: int = 1024
    num_tokens: int = 24
    num_rounds: int = 5
    num_threads: int = 0


def run(settings: Settings) -> str:
    """Measure everything; the Markdown."""
    before, checkpoint = environment(), load_checkpoint(settings.model)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_random_adapters(Path(folder), checkpoint.spec, settings.num_adapters, settings.ranks, seed=0)
        adapters = [read_adapter(path, checkpoint.spec) for path in paths]
    decoders = {compute: _decoder(settings, checkpoint, adapters, compute) for compute in get_args(Compute)}
    generator = np.random.default_rng(0)
    vocabulary, most = checkpoint.spec.vocab_size, max(settings.streams)
    prompt = generator.integers(0, vocabulary, settings.num_prompt_tokens).tolist()
    short = generator.integers(0, vocabulary, (most, _SHORT_PROMPT)).tolist()

    def tokens_per_s(compute: Compute, case: Case) -> float:
        if not case.num_streams:
            return settings.num_prompt_tokens / decoders[compute].decode([prompt], [None], 3).prefill_s
        used = [index % case.num_adapters if case.num_adapters else None for index in range(case.num_streams)]
        return decoders[compute].decode(short[: case.num_streams], used, settings.num_tokens).tokens_per_s

    numbers_of_adapters = (0, settings.num_adapters) if settings.num_adapters else (0,)
    cases = [Case(streams, count) for count in numbers_of_adapters for streams in settings.streams] + [Case(0)]
    measurements: dict[tuple[Case, Compute], Callable[[], float]] = {
        (case, compute): partial(tokens_per_s, compute, case) for case in cases for compute in get_args(Compute)
    }
    for measure in measurements.values():
        measure()
    values = rounds(measurements, settings.num_rounds)
    others = get_args(Compute)[1:]
    forms = ", ".join(f"{compute}: {product_form(compute)}" for compute in others)
    lines = [
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; forms: {forms}; load average "
        f"before {before['load_average']}, after {environment()['load_average']}; {settings.num_rounds} rounds.",
        "",
        "| | float32, tokens/s |" + "".join(f" {compute} / float32 |" for compute in others),
        "|---|---:|" + "---:|" * len(others),
    ]
    for case in cases:
        title = f"{case.num_streams} streams" + (f", {case.num_adapters} adapters" if case.num_adapters else "")
        plain = values[case, "float32"]
        lines.append(
            f"| {title if case.num_streams else f'prompt of {settings.num_prompt_tokens} tokens'} | "
            f"{spread(plain).median:.0f} |" + "".join(f" {ratios(values[case, one], plain)} |" for one in others)
        )
    return "\n".join(lines)


def _decoder(
    settings: Settings, checkpoint: Checkpoint, adapters: Sequence[LoraAdapter], compute: Compute
) -> EngineDecoder:
    most, length = max(settings.streams), _SHORT_PROMPT + settings.num_tokens
    config = EngineConfig(
        cpu=CpuConfig(num_threads=settings.num_threads, compute=compute),
        lora_pool_rows=2 * sum(max(adapter.card.max_rank, 8) for adapter in adapters),
        max_loras=len(adapters) + 1,  # the base model has one
        max_num_seqs=most,
        num_kv_blocks=-(-settings.num_prompt_tokens // 16) + 2 + most * (-(-length // 16) + 1),
        max_model_len=max(settings.num_prompt_tokens + 3, length),
        enable_prefix_caching=False,
        lora_load_bytes_per_step=1 << 30,  # so that all streams of the first run begin together
        target_step_ms=0,
        speculative_decoding="off",
    )
    engine = Engine(load_backend(checkpoint, config), config)
    refs = [AdapterRef(f"adapter-{i}", adapter.card.digest, "bench") for i, adapter in enumerate(adapters)]
    loads = [engine.load_adapter(adapter, ref) for adapter, ref in zip(adapters, refs, strict=True)]
    while not all(load.done() for load in loads):
        engine.step()
    return EngineDecoder(engine, adapters)


def main() -> None:
    """Command line."""
    defaults = Settings(Path())
    parser = argparse.ArgumentParser(description="Speed of each arithmetic of the CPU engine over float32's.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--streams", type=numbers, default=defaults.streams)
    parser.add_argument("--adapters", type=int, default=defaults.num_adapters, help="0: only the base")
    parser.add_argument("--ranks", type=numbers, default=defaults.ranks, help="of the adapters, in turn")
    parser.add_argument("--prompt-tokens", type=int, default=defaults.num_prompt_tokens)
    parser.add_argument("--tokens", type=int, default=defaults.num_tokens)
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds)
    parser.add_argument("--threads", type=int, default=defaults.num_threads)
    given = parser.parse_args()
    sizes = given.prompt_tokens, given.tokens, given.rounds, given.threads
    print(run(Settings(resolve_model(given.model), given.streams, given.adapters, given.ranks, *sizes)))


if __name__ == "__main__":
    main()
