"""Decoding speed of the JAX engine compared with the CPU engine, transformers and PEFT, in one run on one machine.

Prints tokens per second of all systems, ratios within a round (median, lowest, highest), compile times and how many
streams agree on every token. Adapters are random, over all seven projections, and the same files for all systems.
Rounds are interleaved (`stats.py`).

    python -m load_tests.engine.bench_jax --streams 1,8,32 --adapters 8 --ranks 64,32,16,8
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import EngineConfig, XlaConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.xla.backend import XlaBackend
from load_tests.decoding import Decoder, EngineDecoder
from load_tests.random_adapters import write_random_adapters
from load_tests.stats import environment, numbers, ratios, rounds, spread

CPU, JAX, TRANSFORMERS, PEFT = "CPU engine", "JAX engine", "transformers", "PEFT mixed batch"
REFERENCES = (TRANSFORMERS, PEFT)


class Case(NamedTuple):
    """A measurement: the system, the number of adapters that take turns over the streams, the number of streams."""

    system: str
    num_adapters: int
    num_streams: int


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    model: Path
    streams: tuple[int, ...]
    num_adapters: int
    ranks: tuple[int, ...]
    num_prompt_tokens: int
    num_tokens: int
    num_reference_tokens: int
    num_rounds: int
    seed: int
    with_reference: bool


def decoders(settings: Settings, checkpoint: Checkpoint, folder: Path) -> tuple[dict[str, Decoder], str]:
    """All systems, loaded; and a line about compilation."""
    folders = write_random_adapters(
        folder, checkpoint.spec, settings.num_adapters, settings.ranks, settings.seed, bf16=True
    )
    adapters = [read_adapter(path, checkpoint.spec) for path in folders]
    most, length = max(settings.streams), settings.num_prompt_tokens + settings.num_tokens
    config = EngineConfig(
        lora_pool_rows=max(64, 2 * sum(max(8, adapter.card.max_rank) for adapter in adapters)),
        num_kv_blocks=max(8, most * (-(-length // 16) + 1)),
        max_num_seqs=most,
        max_model_len=length,
        enable_prefix_caching=False,
        speculative_decoding="off",
    )
    own = config.on(XlaConfig())
    backend = load_backend(checkpoint, own)
    assert isinstance(backend, XlaBackend)
    backend.programs.wait()
    compile_s = backend.programs.compile_s_by_bucket
    times = ", ".join(f"{b.tokens} x {b.sequences} in {s:.1f} s" for b, s in compile_s.items())
    compiling = f"{JAX} compiled tokens x sequences: {times}; writers {backend.writers_compile_s:.1f} s."
    found: dict[str, Decoder] = {
        CPU: EngineDecoder(Engine(load_backend(checkpoint, config), config), adapters),
        JAX: EngineDecoder(Engine(backend, own), adapters),
    }
    if settings.with_reference:
        from load_tests.engine.reference import PeftDecoder, TransformersDecoder, load_transformers

        model = load_transformers(settings.model)
        found[TRANSFORMERS] = TransformersDecoder(model)
        found[PEFT] = PeftDecoder(model, folders)
    return found, compiling


def run(settings: Settings) -> str:
    """Measure everything; returns the Markdown."""
    before, start = environment(), time.perf_counter()
    checkpoint = load_checkpoint(settings.model)
    shape = (max(settings.streams), settings.num_prompt_tokens)
    prompts = np.random.default_rng(settings.seed).integers(0, checkpoint.spec.vocab_size, shape).tolist()
    tokens: dict[Case, tuple[tuple[int, ...], ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        found, compiling = decoders(settings, checkpoint, Path(folder))

        def measure(case: Case) -> float:
            print(f"{time.perf_counter() - start:.0f} s: {case}", file=sys.stderr, flush=True)
            n, a = case.num_streams, case.num_adapters
            count = settings.num_reference_tokens if case.system in REFERENCES else settings.num_tokens
            decoded = found[case.system].decode(prompts[:n], [i % a if a else None for i in range(n)], count)
            tokens[case] = decoded.token_ids
            return decoded.tokens_per_s

        cases = [
            Case(system, count, n)
            for n in settings.streams
            for count, absent in ((0, PEFT), (settings.num_adapters, TRANSFORMERS))
            for system in found
            if system != absent
        ]
        for case in cases:
            if case.system not in REFERENCES:
                measure(case)  # makes adapters resident
        values = rounds({case: partial(measure, case) for case in cases}, settings.num_rounds)
    header = (
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
        f"{before['load_average']}, after {environment()['load_average']}. {settings.num_prompt_tokens} prompt tokens, "
        f"{settings.num_tokens} tokens ({settings.num_reference_tokens} of the references), ranks "
        f"{', '.join(map(str, settings.ranks))} in turn, {settings.num_rounds} interleaved rounds."
    )
    parts = [header, compiling, _rates(settings, values), _ratios(settings, values)]
    return "\n\n".join([*parts, _agreement(tokens)])


def _rates(settings: Settings, values: dict[Case, list[float]]) -> str:
    lines = _head("tokens/s, median of the rounds", settings)
    for a in (0, settings.num_adapters):
        for system in dict.fromkeys(case.system for case in values if case.num_adapters == a):
            cells = [f"{spread(values[Case(system, a, n)]).median:.1f}" for n in settings.streams]
            lines.append(f"| {system}, {f'{a} adapters' if a else 'base'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratios(settings: Settings, values: dict[Case, list[float]]) -> str:
    lines = _head("ratio within a round, median (lowest to highest)", settings)
    a = settings.num_adapters

    def line(title: str, one: tuple[str, int], other: tuple[str, int]) -> None:
        cells = [str(ratios(values[Case(*one, n)], values[Case(*other, n)])) for n in settings.streams]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")

    line(f"{JAX} / CPU engine, base", (JAX, 0), (CPU, 0))
    line(f"{JAX} / CPU engine, {a} adapters", (JAX, a), (CPU, a))
    line(f"{JAX}, {a} adapters / its base", (JAX, a), (JAX, 0))
    if settings.with_reference:
        line(f"{JAX} / transformers, base", (JAX, 0), (TRANSFORMERS, 0))
        line(f"{JAX} / PEFT, {a} adapters", (JAX, a), (PEFT, a))
    line(f"CPU engine, {a} adapters / its base", (CPU, a), (CPU, 0))
    return "\n".join(lines)


def _head(title: str, settings: Settings) -> list[str]:
    columns = " | ".join(f"{n} stream{'s' if n > 1 else ''}" for n in settings.streams)
    return [f"| {title} | {columns} |", "|---|" + "---:|" * len(settings.streams)]


def _agreement(tokens: dict[Case, tuple[tuple[int, ...], ...]]) -> str:
    """How many streams of each system have the CPU engine's tokens, over as many as both generated."""
    same: dict[str, list[bool]] = {}
    for case, streams in tokens.items():
        if case.system != CPU:
            ours = tokens[case._replace(system=CPU)]
            pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = list(zip(streams, ours, strict=True))
            same.setdefault(case.system, []).extend(a[: len(b)] == b[: len(a)] for a, b in pairs)
    found = ", ".join(f"{system} {sum(values)} of {len(values)}" for system, values in same.items())
    return f"Streams with the CPU engine's greedy tokens: {found}."


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Decoding speed of the JAX engine compared with the CPU engine and PEFT."
    )
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--streams", type=numbers, default=(1, 8, 32))
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--ranks", type=numbers, default=(64, 32, 16, 8), help="given to the adapters in turn")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--reference-tokens", type=int, default=5, help="fewer, because the references are slow")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-reference", action="store_true", help="without transformers and PEFT")
    given = parser.parse_args()
    settings = Settings(
        model=resolve_model(given.model),
        streams=given.streams,
        num_adapters=given.adapters,
        ranks=given.ranks,
        num_prompt_tokens=given.prompt_tokens,
        num_tokens=given.tokens,
        num_reference_tokens=given.reference_tokens,
        num_rounds=given.rounds,
        seed=given.seed,
        with_reference=not given.no_reference,
    )
    print(run(settings))


if __name__ == "__main__":
    main()
