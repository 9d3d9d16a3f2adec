"""Measure what the simulation counts with: what steps, prompts and writes of the real engine take on this machine.

In: a base model. Out: a table of costs (JSON) for `app.simulation.costs`. The engine alone, without threads, Ray or
HTTP; adapters lie in host memory. Steps of 1 to 16 streams are measured with no adapter, with one for all and with one
each; `step_s`, `sequence_s` and `row_s` are the non-negative least squares of their medians. What loading takes to the
host, and starting a replica, is taken over from the table that is there: `bench_adapters` and `bench_start` have it.

    python -m load_tests.simulate.measure --out costs.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from app.engine.adapters.card import AdapterRef
from app.engine.adapters.formats.peft import read_peft
from app.engine.adapters.lora import LoraAdapter
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.sources import DEFAULT_MODEL_URI, resolve_model
from app.engine.open import load_backend
from app.engine.request import GenerateRequest, SamplingParams
from app.simulation.costs import Costs, read_costs, write_costs
from load_tests.measuring import environment
from load_tests.random_adapters import write_random_adapters

STREAMS = (1, 4, 8, 16)
RANK = 16
NUM_STEPS = 24
PROMPTS = (64, 256)


class _Bench:
    """One engine, and requests for it."""

    def __init__(self, model: Path) -> None:
        checkpoint = load_checkpoint(model)
        config = EngineConfig(
            adapter_rank_rows=RANK * 32,
            max_adapter_slots=33,
            max_batch_sequences=32,
            max_batch_tokens=2048,
            num_kv_blocks=1024,
            max_context=1024,
            prefix_cache=False,
            speculation="off",
            prefill_step_ms=0,
        )
        self.spec = checkpoint.spec
        self.engine = Engine(load_backend(checkpoint, config), config)
        with tempfile.TemporaryDirectory() as folder:
            folders = write_random_adapters(Path(folder), self.spec, 4, [RANK], 0, True)
            self._sets = [read_peft(path, self.spec) for path in folders]
        self._count = 0

    @property
    def row_bytes(self) -> float:
        return self._sets[0].card.size_bytes / RANK

    def adapter(self, index: int) -> tuple[AdapterRef, LoraAdapter]:
        digest, weights = f"{index:064x}", self._sets[index % len(self._sets)]
        return AdapterRef(f"a{index}", digest, "bench"), replace(weights, card=replace(weights.card, digest=digest))

    def submit(self, num_prompt: int, num_tokens: int, adapter: int | None) -> None:
        self._count += 1
        ref, weights = (None, None) if adapter is None else self.adapter(adapter)
        prompt = tuple(np.random.default_rng(self._count).integers(0, self.spec.vocab_size, num_prompt).tolist())
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(GenerateRequest(f"r{self._count}", "bench", prompt, sampling, ref), weights)

    def step_s(self) -> float:
        started_s = time.perf_counter()
        for chunk in self.engine.step():
            if chunk.error is not None:
                raise chunk.error
        return time.perf_counter() - started_s

    def decode_s(self, num_streams: int, num_adapters: int) -> float:
        """The median step of so many streams, of which the first have adapters, each its own or all one."""
        for index in range(num_streams):
            self.submit(4, NUM_STEPS + 4, index % num_adapters if num_adapters else None)
        times = [self.step_s() for _ in range(NUM_STEPS)][4:]
        while self.engine.has_work:
            self.step_s()
        return float(np.median(times))

    def prompt_s(self, num_tokens: int) -> float:
        """The fastest of three steps that compute a prompt and nothing else."""
        times = []
        for _ in range(3):
            self.submit(num_tokens, 1, None)
            times.append(self.step_s())
        return min(times)


def measure(model: Path, before: Costs) -> Costs:
    """`before` has what is not measured here."""
    bench = _Bench(model)
    bench.decode_s(max(STREAMS), max(STREAMS))  # compiles, and writes the adapters
    rows, seconds = [], []
    for num_streams in STREAMS:
        for num_adapters in sorted({0, 1, num_streams}):
            rows.append((1.0, float(num_streams), float(num_adapters * RANK)))
            seconds.append(bench.decode_s(num_streams, num_adapters))
    (step_s, sequence_s, row_s), _ = nnls(np.array(rows), np.array(seconds))
    short_s, long_s = (bench.prompt_s(count) for count in PROMPTS)
    stats = bench.engine.stats()
    here = environment()
    return replace(
        before,
        step_s=float(step_s),
        sequence_s=float(sequence_s),
        row_s=float(row_s),
        prompt_token_s=max(0.0, (long_s - short_s) / (PROMPTS[1] - PROMPTS[0])),
        row_write_s=stats.adapter_write_s / max(stats.num_adapter_writes, 1) / RANK,
        row_bytes=bench.row_bytes,
        machine=f"{here['cpu']}, {here['num_cpus']} CPUs, {bench.spec.name}, adapters of rank {RANK}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL_URI)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    costs = measure(resolve_model(arguments.model), read_costs())
    write_costs(costs, arguments.out)
    print(costs)


if __name__ == "__main__":
    main()
