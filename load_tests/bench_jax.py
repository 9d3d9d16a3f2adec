"""Decoding speed of the JAX engine beside the torch engine, in one run on one machine.

In: a base model, numbers of streams, adapters. Out: a Markdown table on stdout: tokens per second of both, the
ratios (median of rounds, lowest and highest), what compiling took and how many streams agree on every token.
Adapters are random, over all seven projections. Rounds are interleaved (`measuring.py`).

    python -m load_tests.bench_jax --streams 1,8,32 --adapters 8 --ranks 64,32,16,8
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.engine.adapters.peft import read_peft
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.loading import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.sources import DEFAULT_MODEL_URI, resolve_model
from load_tests.decoding import EngineDecoder
from load_tests.measuring import environment, ratios, rounds, spread
from load_tests.random_adapters import write_random_adapters


class Case(NamedTuple):
    """Which engine, how many adapters take turns over the streams, how many streams."""

    backend: str
    num_adapters: int
    num_streams: int


def main() -> None:
    """Read the command line, measure, print."""
    given = _arguments()
    checkpoint = load_checkpoint(resolve_model(given.model))
    prompts = (
        np.random.default_rng(given.seed).integers(0, checkpoint.spec.vocab_size, (max(given.streams), 16)).tolist()
    )
    tokens: dict[Case, tuple[tuple[int, ...], ...]] = {}
    found: dict[str, EngineDecoder] = {}
    compiling = ""
    with tempfile.TemporaryDirectory() as folder:
        folders = write_random_adapters(Path(folder), checkpoint.spec, given.adapters, given.ranks, given.seed)
        adapters = [read_peft(path, checkpoint.spec) for path in folders]
    for name in ("torch", "jax"):
        config = EngineConfig(
            backend="jax" if name == "jax" else "torch",
            adapter_rank_rows=max(64, 2 * sum(max(8, adapter.card.max_rank) for adapter in adapters)),
            num_kv_blocks=max(given.streams) * (-(-(16 + given.tokens) // 16) + 1),
            max_batch_sequences=max(given.streams),
            max_context=16 + given.tokens,
            prefix_cache=False,
        )
        backend = load_backend(checkpoint, config)
        if name == "jax":
            programs = backend.programs  # type: ignore[attr-defined]  # no other backend has them
            programs.wait()
            compiling = f"{programs.num_compiled} programs compiled in {sum(programs.compile_s.values()):.1f} s"
        found[name] = EngineDecoder(Engine(backend, config), adapters)

    def measure(case: Case) -> float:
        order = [i % case.num_adapters if case.num_adapters else None for i in range(case.num_streams)]
        decoded = found[case.backend].decode(prompts[: case.num_streams], order, given.tokens)
        tokens[case] = decoded.token_ids
        return decoded.tokens_per_s

    cases = [Case(b, a, n) for n in given.streams for a in (0, given.adapters) for b in ("torch", "jax")]
    for case in cases:
        measure(case)  # makes adapters resident
    values = rounds({case: partial(measure, case) for case in cases}, given.rounds)
    machine = environment()
    print(f"{machine['cpu']}, {machine['num_cpus']} CPUs, load average {machine['load_average']}. {compiling}.\n")
    print("| streams | adapters | torch tokens/s | JAX tokens/s | JAX / torch | JAX / its base | equal streams |")
    print("|---|---|---|---|---|---|---|")
    for n in given.streams:
        for a in (0, given.adapters):
            torch_case, jax_case = Case("torch", a, n), Case("jax", a, n)
            same = sum(x == y for x, y in zip(tokens[torch_case], tokens[jax_case], strict=True))
            print(
                f"| {n} | {a} | {spread(values[torch_case]).median:.1f} | {spread(values[jax_case]).median:.1f} | "
                f"{ratios(values[jax_case], values[torch_case])} | "
                f"{ratios(values[jax_case], values[Case('jax', 0, n)])} | {same} of {n} |"
            )


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description="Decoding speed of the JAX engine beside the torch engine.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI)
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--ranks", type=numbers, default=[64, 32, 16, 8])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
