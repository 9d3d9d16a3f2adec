"""The engine compared with the machine's bounds: prefill with a plain matmul, adapters with their bytes.

Prints Markdown. The bounds are measured in the same rounds as the engine:

- prefill: floating-point operations of the prompt (base products and attention) per second, over the rate
  of torch's float32 matmul of 2048 x 2048 matrices on as many threads;
- different adapters: a decoding step in which every stream has its own adapter, over the bound "the base's step
  in the same round, plus the adapters' bytes at the bandwidth of torch's sum over 512 MB".

    python -m load_tests.engine.bench_bounds --prompt-tokens 1024 --streams 8,32 --rank 16
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.models.linear_modules import DENSE_TARGETS, target_shape
from app.engine.models.spec import ModelSpec
from load_tests.decoding import EngineDecoder
from load_tests.random_adapters import write_random_adapters
from load_tests.stats import environment, numbers, rounds, spread

MATMUL, BANDWIDTH, PREFILL = "matmul", "bandwidth", "prefill"
_SIDE = 2048
_READ_BYTES = 512 << 20


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    model: Path
    num_prompt_tokens: int
    streams: tuple[int, ...]
    rank: int
    num_tokens: int
    num_rounds: int
    num_threads: int
    seed: int


def prompt_flops(spec: ModelSpec, num_tokens: int) -> int:
    """Operations of one prompt: base products of every token, attention of each over those before it, one logit row."""
    products = sum(
        int(np.prod(target_shape(spec, index, target))) for index in range(len(spec.layers)) for target in DENSE_TARGETS
    )
    pairs = num_tokens * (num_tokens + 1) // 2
    attention = sum(layer.attention.num_heads * layer.attention.head_dim for layer in spec.layers)
    return 2 * num_tokens * products + 4 * pairs * attention + 2 * spec.vocab_size * spec.hidden_size


def adapter_bytes(spec: ModelSpec, rank: int) -> int:
    """What the kernels read of one adapter over all projections, in float32."""
    return (
        4
        * rank
        * sum(sum(target_shape(spec, index, target)) for index in range(len(spec.layers)) for target in DENSE_TARGETS)
    )


def run(settings: Settings) -> str:
    """Measure everything; the Markdown."""
    torch.set_num_threads(settings.num_threads or torch.get_num_threads())
    before = environment()
    checkpoint = load_checkpoint(settings.model)
    spec = checkpoint.spec
    rng = np.random.default_rng(settings.seed)
    most = max(settings.streams)
    length = max(settings.num_prompt_tokens + 3, 16 + settings.num_tokens)
    config = EngineConfig(
        cpu=CpuConfig(num_threads=settings.num_threads),
        lora_pool_rows=most * settings.rank,
        max_loras=most + 1,
        max_num_seqs=most,
        num_kv_blocks=-(-settings.num_prompt_tokens // 16) + 2 + most * (2 + settings.num_tokens // 16),
        max_model_len=length,
        enable_prefix_caching=False,
        speculative_decoding="off",
    )
    square = torch.randn(_SIDE, _SIDE)
    memory = torch.zeros(_READ_BYTES // 4)
    with tempfile.TemporaryDirectory() as folder:
        folders = write_random_adapters(Path(folder), spec, most, [settings.rank], settings.seed)
        adapters = [read_adapter(path, spec) for path in folders]
        decoder = EngineDecoder(Engine(load_backend(checkpoint, config), config), adapters)
        prompt = rng.integers(0, spec.vocab_size, settings.num_prompt_tokens).tolist()
        short = rng.integers(0, spec.vocab_size, (most, 16)).tolist()

        def step_s(num_streams: int, adapted: bool) -> float:
            own = [i if adapted else None for i in range(num_streams)]
            return num_streams / decoder.decode(short[:num_streams], own, settings.num_tokens).tokens_per_s

        measurements: dict[object, Callable[[], float]] = {
            MATMUL: lambda: 2 * _SIDE**3 / _best_s(lambda: square @ square),
            BANDWIDTH: lambda: _READ_BYTES / _best_s(memory.sum),
            PREFILL: lambda: prompt_flops(spec, len(prompt)) / decoder.decode([prompt], [None], 3).prefill_s,
        }
        for n in settings.streams:
            measurements |= {(n, adapted): partial(step_s, n, adapted) for adapted in (False, True)}
        for measure in measurements.values():
            measure()
        values = rounds(measurements, settings.num_rounds)
    share = spread([a / b for a, b in zip(values[PREFILL], values[MATMUL], strict=True)])
    lines = [
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
        f"{before['load_average']}, after {environment()['load_average']}; {settings.num_rounds} rounds. "
        f"Medians: matmul {spread(values[MATMUL]).median / 1e9:.0f} GFLOP/s, "
        f"memory {spread(values[BANDWIDTH]).median / 1e9:.1f} GB/s.",
        "",
        "| | ratio within a round, median (lowest to highest) |",
        "|---|---:|",
        f"| prefill of {settings.num_prompt_tokens} tokens / matmul rate | {share} |",
    ]
    for n in settings.streams:
        bound = [
            base + n * adapter_bytes(spec, settings.rank) / bandwidth
            for base, bandwidth in zip(values[n, False], values[BANDWIDTH], strict=True)
        ]
        over = spread([step / least for step, least in zip(values[n, True], bound, strict=True)])
        lines.append(f"| {n} streams, {n} adapters of rank {settings.rank}: step / bytes bound | {over} |")
    return "\n".join(lines)


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="The engine compared with the machine's own limits.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--streams", type=numbers, default=(8, 32), help="each stream with an adapter of its own")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(
        run(
            Settings(
                resolve_model(arguments.model),
                arguments.prompt_tokens,
                arguments.streams,
                arguments.rank,
                arguments.tokens,
                arguments.rounds,
                arguments.threads,
                arguments.seed,
            )
        )
    )


if __name__ == "__main__":
    main()
