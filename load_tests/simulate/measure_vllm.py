"""Measures the simulation's costs of vLLM: its steps, prompts and adapter loads through `engine.vllm` on this machine.

Writes a table of costs (JSON) for `polylora capacity --costs` and `load_tests.simulate`. Batches of several sizes
decode, with no adapter and with one per sequence; prompts of several lengths are computed; adapters are loaded. Times
are taken where the engine's caller gets tokens, so they include the way from vLLM's process. A sequence with an adapter
counts `engine.vllm.max_lora_rank` rank rows, as vLLM computes that many. Other costs are those of the default table.

    python -m load_tests.simulate.measure_vllm --config configs/serve-gpu.yaml --out vllm.json
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from app.cli.config_file import read_settings
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import EngineConfig, VllmConfig
from app.engine.engine_thread import EngineThread
from app.engine.factory import create_engine
from app.engine.models.checkpoint import Checkpoint, open_model
from app.engine.request import GenerateRequest, SamplingParams, TokenChunk
from app.simulation.costs import Costs, read_costs, write_costs
from app.version import version
from load_tests.random_adapters import write_random_adapters
from load_tests.simulate.measure import fit
from load_tests.simulate.real_fleet import Step
from load_tests.stats import environment, numbers

TENANT = "measure"
PROMPT_TOKENS = (16, 64, 192)
NUM_REPEATS = 3


class Arrivals:
    """When each request's chunks came."""

    def __init__(self) -> None:
        self.chunk_s: dict[str, list[float]] = defaultdict(list)
        self._ended: set[str] = set()
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def __call__(self, chunks: list[TokenChunk]) -> None:
        """The engine's callback."""
        now_s = time.perf_counter()
        with self._changed:
            for chunk in chunks:
                self._error = self._error or chunk.error
                self.chunk_s[chunk.request_id].append(now_s)
                if chunk.finish_reason is not None:
                    self._ended.add(chunk.request_id)
            self._changed.notify_all()

    def wait(self, names: Sequence[str], timeout_s: float = 600.0) -> None:
        """Until all have ended. Raises the first error of a request, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._error or self._ended.issuperset(names), timeout_s):
                raise TimeoutError(f"{set(names) - self._ended} have not ended in {timeout_s:g} s")
            if self._error is not None:
                raise self._error


class Measurement:
    """A running engine and the steps that it has been seen to take."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, adapters: Sequence[LoraAdapter]) -> None:
        self._arrivals = Arrivals()
        self._adapters = adapters
        self._rank = config.section(VllmConfig).max_lora_rank
        started_s = time.perf_counter()
        self._engine: EngineThread = create_engine(checkpoint, config, self._arrivals)
        self._engine.warm_up()
        self.start_s = time.perf_counter() - started_s
        self._engine.start()
        self._rng = np.random.default_rng(0)
        self._vocab_size = checkpoint.spec.vocab_size
        self._num_requests = 0
        self.steps: list[Step] = []

    def load(self) -> None:
        """Load every adapter, and unload it again."""
        for adapter in self._adapters:
            started_s = time.perf_counter()
            self._engine.load_adapter(adapter, AdapterRef("a", adapter.card.digest, TENANT)).result(600)
            self.steps.append(Step(0, 0, 0, 0, self._rank, time.perf_counter() - started_s))
            self._engine.unload_adapter(adapter.card.digest).result(600)

    def compute_prompts(self) -> None:
        for count in PROMPT_TOKENS * NUM_REPEATS:
            started_s = time.perf_counter()
            name = self._submit(count, 1, None)
            self._arrivals.wait([name])
            seconds = self._arrivals.chunk_s[name][0] - started_s
            self.steps.append(Step(0, 0, count, count * (count + 1) // 2, 0, seconds))

    def decode(self, num_sequences: int, num_tokens: int) -> None:
        """Batches of base sequences, and of sequences with an adapter each."""
        for adapters in ([None] * num_sequences, self._adapters[:num_sequences]):
            rows = sum(adapter is not None for adapter in adapters) * self._rank
            names = [self._submit(16, num_tokens, adapter) for adapter in adapters]
            self._arrivals.wait(names)
            seen = [self._arrivals.chunk_s[name] for name in names]
            first_s, last_s = max(times[0] for times in seen), min(times[-1] for times in seen)
            together = [when for when in seen[0] if first_s <= when <= last_s]
            self.steps += [Step(len(names), rows, 0, 0, 0, after - before) for before, after in pairwise(together)]

    def close(self) -> None:
        self._engine.stop(60.0)

    def _submit(self, num_prompt: int, num_tokens: int, adapter: LoraAdapter | None) -> str:
        self._num_requests += 1
        name = f"m{self._num_requests}"
        prompt = tuple(self._rng.integers(3, self._vocab_size, num_prompt).tolist())
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        ref = AdapterRef("a", adapter.card.digest, TENANT) if adapter is not None else None
        self._engine.submit(GenerateRequest(name, TENANT, prompt, sampling, ref), adapter)
        return name


def measure(checkpoint: Checkpoint, config: EngineConfig, streams: Sequence[int], num_tokens: int, seed: int) -> Costs:
    """Start vLLM, and fit what its steps took."""
    section = config.section(VllmConfig)
    with tempfile.TemporaryDirectory() as name:
        folders = write_random_adapters(Path(name), checkpoint.spec, section.max_loras, (section.max_lora_rank,), seed)
        adapters = [read_adapter(folder, checkpoint.spec) for folder in folders]
    measurement = Measurement(checkpoint, config, adapters)
    try:
        measurement.load()
        measurement.compute_prompts()
        for count in streams:
            measurement.decode(min(count, section.max_loras), num_tokens)
    finally:
        measurement.close()
    card, before = adapters[0].card, read_costs()
    return replace(
        fit(measurement.steps, before),
        row_bytes=card.size_bytes / card.max_rank,
        start_s=max(before.start_s, measurement.start_s),
        machine=f"vLLM on {environment()['cpu']}, {checkpoint.spec.name}",
        source=f"python -m load_tests.simulate.measure_vllm, polylora {version()}, {len(measurement.steps)} steps",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a Serve application file with engine.vllm")
    parser.add_argument("--streams", type=numbers, default=(1, 2, 4, 8), help="sequences in a batch; at most max_loras")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    settings = read_settings(arguments.config)
    checkpoint = open_model(settings.model.uri, settings.model.name)
    costs = measure(checkpoint, settings.engine, arguments.streams, arguments.tokens, arguments.seed)
    write_costs(costs, arguments.out)
    print(costs)


if __name__ == "__main__":
    main()
