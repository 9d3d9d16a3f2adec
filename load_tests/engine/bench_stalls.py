"""Effect of cold adapters on other streams: gaps between tokens while they arrive, and a thousand with room for few.

Prints ratios of one round of one run. The engine runs alone, without threads, Ray or HTTP; adapters lie in host memory,
and every cold one is written to its rows in a step that other streams share.

- bursts: streams decode with resident adapters while requests for one token arrive in bursts; the time of each
  step is the gap every stream sees. Compared: no arrivals, arrivals for resident adapters, and arrivals for
  adapters that must be written first. The cost of the second is the requests' own work, not the adapters'.
- thousand: as many streams as fit, each request's adapter drawn by popularity, compared with the same requests for
  one adapter. Several digests share one set of weights in host memory: the bytes written and read per step are real.

    python -m load_tests.engine.bench_stalls --adapters 1000 --resident 32 --popularity powerlaw:0.2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.request import GenerateRequest, SamplingParams
from load_tests.popularity import adapter_indices
from load_tests.random_adapters import write_random_adapters
from load_tests.stats import environment, ratios, rounds, spread

NOTHING, RESIDENT, COLD = "no arrivals", "arrivals, resident adapters", "arrivals, cold adapters"
#: Sets of weights behind all digests.
_SETS = 8


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    model: Path
    num_streams: int = 16
    num_steps: int = 100
    burst: int = 4
    burst_every: int = 10
    rank: int = 16
    num_adapters: int = 1000
    num_resident: int = 32
    num_requests: int = 64
    num_tokens: int = 32
    popularity: str = "powerlaw:0.2"
    num_rounds: int = 3
    num_threads: int = 0
    seed: int = 0
    bf16_adapters: bool = True


class _Adapters:
    """`count` digests over a few sets of weights."""

    def __init__(self, sets: Sequence[LoraAdapter], count: int) -> None:
        self._sets = sets
        self._weights: dict[int, LoraAdapter] = {}
        self.refs = [AdapterRef(f"adapter-{i}", f"{i:064x}", "bench") for i in range(count)]

    def weights(self, index: int) -> LoraAdapter:
        """The same object every time, as a replica keeps them."""
        if index not in self._weights:
            adapter = self._sets[index % len(self._sets)]
            self._weights[index] = replace(adapter, card=replace(adapter.card, digest=self.refs[index].digest))
        return self._weights[index]


def run(settings: Settings) -> str:
    """Measure everything; the Markdown."""
    before = environment()
    checkpoint = load_checkpoint(settings.model)
    with tempfile.TemporaryDirectory() as folder:
        folders = write_random_adapters(
            Path(folder), checkpoint.spec, _SETS, [settings.rank], settings.seed, settings.bf16_adapters
        )
        sets = [read_adapter(path, checkpoint.spec) for path in folders]
    bursts, thousand = _bursts(settings, checkpoint, sets), _thousand(settings, checkpoint, sets)
    dtype = "bfloat16" if settings.bf16_adapters else "float32"
    return (
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
        f"{before['load_average']}, after {environment()['load_average']}; {settings.num_rounds} interleaved rounds, "
        f"adapters of rank {settings.rank} over all projections in {dtype}.\n\n{bursts}\n\n{thousand}"
    )


def _engine(settings: Settings, checkpoint: Checkpoint, num_resident: int, num_sequences: int, length: int) -> Engine:
    config = EngineConfig(
        cpu=CpuConfig(num_threads=settings.num_threads),
        lora_pool_rows=num_resident * settings.rank,
        max_loras=num_resident + 1,
        max_num_seqs=num_sequences,
        num_kv_blocks=num_sequences * (-(-length // 16) + 1),
        max_model_len=length,
        enable_prefix_caching=False,
        speculative_decoding="off",
    )
    return Engine(load_backend(checkpoint, config), config)


def _bursts(settings: Settings, checkpoint: Checkpoint, sets: Sequence[LoraAdapter]) -> str:
    num_resident, num_warm = 2 * settings.burst + 4, 4 + settings.burst
    length = settings.num_steps + 16
    engine = _engine(settings, checkpoint, num_resident, settings.num_streams + 2 * settings.burst, length)
    # The first four are the streams'; the next `burst` stay resident; the rest are cold whenever they come.
    num_cold = settings.burst * (settings.num_steps // settings.burst_every + 1) + num_resident
    adapters = _Adapters(sets, num_warm + num_cold)
    rng = np.random.default_rng(settings.seed)
    counter = iter(range(1 << 40))

    def submit(index: int, num_tokens: int) -> None:
        prompt = tuple(rng.integers(0, checkpoint.spec.vocab_size, 4).tolist())
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(f"r{next(counter)}", "bench", prompt, sampling, adapters.refs[index])
        engine.submit(request, adapters.weights(index))

    def step() -> float:
        started = time.perf_counter()
        for chunk in engine.step():
            if chunk.error is not None:
                raise chunk.error
        return time.perf_counter() - started

    def p99_s(kind: str) -> float:
        for i in range(settings.num_streams):
            submit(i % 4, settings.num_steps)
        for i in range(4, num_warm):
            submit(i, 1)
        for _ in range(8):
            step()
        cold = iter(range(num_warm, num_warm + num_cold))
        gaps = []
        for number in range(settings.num_steps - 12):
            if kind != NOTHING and number % settings.burst_every == 0:
                for i in range(settings.burst):
                    submit(4 + i if kind == RESIDENT else next(cold), 1)
            gaps.append(step())
        while engine.has_work:
            step()
        return float(np.percentile(gaps, 99))

    kinds = (NOTHING, RESIDENT, COLD)
    p99_s(COLD)
    values = rounds({kind: partial(p99_s, kind) for kind in kinds}, settings.num_rounds)
    lines = [
        f"{settings.num_streams} streams; every {settings.burst_every} steps {settings.burst} requests for one token "
        "arrive, each with an adapter of its own.",
        "",
        "| p99 of the gap between tokens | ratio, median (lowest to highest) |",
        "|---|---:|",
        f"| resident adapters arrive / nothing arrives | {ratios(values[RESIDENT], values[NOTHING])} |",
        f"| cold adapters arrive / nothing arrives | {ratios(values[COLD], values[NOTHING])} |",
        f"| cold adapters arrive / resident adapters arrive | {ratios(values[COLD], values[RESIDENT])} |",
    ]
    return "\n".join(lines)


def _thousand(settings: Settings, checkpoint: Checkpoint, sets: Sequence[LoraAdapter]) -> str:
    length = settings.num_tokens + 16
    engine = _engine(settings, checkpoint, settings.num_resident, settings.num_streams, length)
    adapters = _Adapters(sets, settings.num_adapters)
    rng = np.random.default_rng(settings.seed)
    requested = adapter_indices(
        settings.popularity, settings.num_adapters, np.zeros(settings.num_requests), rng
    ).tolist()
    counter = iter(range(1 << 40))
    written: list[int] = []

    def tokens_per_s(many: bool) -> float:
        pending, running = list(requested), 0
        sampling = SamplingParams(max_tokens=settings.num_tokens, temperature=0.0, ignore_eos=True)
        writes = engine.stats().num_adapter_writes
        started = time.perf_counter()
        while pending or running:
            while pending and running < settings.num_streams:
                index = pending.pop() * many
                prompt = tuple(rng.integers(0, checkpoint.spec.vocab_size, 8).tolist())
                request = GenerateRequest(f"t{next(counter)}", "bench", prompt, sampling, adapters.refs[index])
                engine.submit(request, adapters.weights(index))
                running += 1
            for chunk in engine.step():
                if chunk.error is not None:
                    raise chunk.error
                running -= chunk.finish_reason is not None
        if many:
            written.append(engine.stats().num_adapter_writes - writes)
        return settings.num_requests * settings.num_tokens / (time.perf_counter() - started)

    tokens_per_s(True)
    values = rounds({many: partial(tokens_per_s, many) for many in (False, True)}, settings.num_rounds)
    return "\n".join(
        [
            f"{settings.num_adapters} adapters, popularity {settings.popularity}, room for {settings.num_resident}; "
            f"{settings.num_requests} requests of {settings.num_tokens} tokens, {settings.num_streams} at a time; "
            f"{len(set(requested))} different adapters asked for, {spread(written).median:.0f} written per round.",
            "",
            "| whole throughput, prefill and writes included | ratio, median (lowest to highest) |",
            "|---|---:|",
            f"| {settings.num_adapters} adapters / one adapter | {ratios(values[True], values[False])} |",
        ]
    )


def main() -> None:
    """Command line."""
    defaults = Settings(Path())
    parser = argparse.ArgumentParser(description="Effect of cold adapters on other streams.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--streams", type=int, default=defaults.num_streams)
    parser.add_argument("--steps", type=int, default=defaults.num_steps, help="steps measured per round")
    parser.add_argument("--burst", type=int, default=defaults.burst, help="requests that arrive together")
    parser.add_argument("--burst-every", type=int, default=defaults.burst_every, help="steps between bursts")
    parser.add_argument("--rank", type=int, default=defaults.rank)
    parser.add_argument("--adapters", type=int, default=defaults.num_adapters)
    parser.add_argument("--resident", type=int, default=defaults.num_resident, help="adapters that fit in the rows")
    parser.add_argument("--requests", type=int, default=defaults.num_requests)
    parser.add_argument("--tokens", type=int, default=defaults.num_tokens)
    parser.add_argument("--popularity", default=defaults.popularity, help="see load_tests/popularity.py")
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapter-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="in their files")
    given = parser.parse_args()
    print(
        run(
            Settings(
                model=resolve_model(given.model),
                num_streams=given.streams,
                num_steps=given.steps,
                burst=given.burst,
                burst_every=given.burst_every,
                rank=given.rank,
                num_adapters=given.adapters,
                num_resident=given.resident,
                num_requests=given.requests,
                num_tokens=given.tokens,
                popularity=given.popularity,
                num_rounds=given.rounds,
                num_threads=given.threads,
                seed=given.seed,
                bf16_adapters=given.adapter_dtype == "bfloat16",
            )
        )
    )


if __name__ == "__main__":
    main()
