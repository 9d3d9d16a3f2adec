"""Whether it pays to merge an adapter into the weights: merged engines compared with one engine with adapters.

Prints tokens per second, all streams on the same cores. "Grouped" is one engine, its streams spread over the adapters.
"Merged" is one engine per adapter (`engine.merged_adapter`), each with its adapter's streams, one after the other: its
step takes as long as all of theirs together. Adapters have equal ranks, so one merged engine stands for all. Grouped
runs twice: with the base as it is stored, and in float32, as merged weights are (they lie on no grid of 8 bits). Rounds
are interleaved.

    python -m load_tests.engine.bench_merge --streams 1,8,64 --adapters 1,2,5
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import CpuConfig, EngineConfig, WeightDtype
from app.engine.factory import new_engine
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from load_tests.decoding import EngineDecoder
from load_tests.random_adapters import write_random_adapters
from load_tests.stats import environment, numbers, ratios, rounds, spread

GROUPED, IN_FLOAT32, MERGED = "grouped", "grouped, float32", "merged"


class Case(NamedTuple):
    """A measurement: the system, and the numbers of streams and adapters."""

    system: str
    num_adapters: int
    num_streams: int


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    model: Path
    streams: tuple[int, ...] = (1, 8, 64)
    adapters: tuple[int, ...] = (1, 2, 5)
    rank: int = 16
    num_prompt_tokens: int = 16
    num_tokens: int = 24
    num_rounds: int = 3
    num_threads: int = 0
    seed: int = 0


def run(settings: Settings) -> str:
    """Measure everything; the Markdown."""
    before = environment()
    checkpoint = load_checkpoint(settings.model)
    rng = np.random.default_rng(settings.seed)
    shape = (max(settings.streams), settings.num_prompt_tokens)
    prompts: list[list[int]] = rng.integers(0, checkpoint.spec.vocab_size, shape).tolist()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_random_adapters(
            Path(folder), checkpoint.spec, max(settings.adapters), (settings.rank,), settings.seed
        )
        decoders = _decoders(settings, checkpoint, paths)

        def tokens_per_s(case: Case) -> float:
            used = min(case.num_adapters, case.num_streams)
            if case.system != MERGED:
                adapters = [index % used for index in range(case.num_streams)]
                return (
                    decoders[case.system]
                    .decode(prompts[: case.num_streams], adapters, settings.num_tokens)
                    .tokens_per_s
                )
            seconds = 0.0
            for index in range(used):  # streams of one adapter each, one engine after the other
                count = len(range(index, case.num_streams, used))
                decoded = decoders[MERGED].decode(prompts[:count], [0] * count, settings.num_tokens)
                seconds += count / decoded.tokens_per_s
            return case.num_streams / seconds

        cases = [
            Case(system, a, n) for n in settings.streams for a in settings.adapters for system in decoders if a <= n or
            a == min(settings.adapters)
        ]  # fmt: skip
        for case in cases:
            tokens_per_s(case)  # adapters become resident, memory is touched
        values = rounds({case: partial(tokens_per_s, case) for case in cases}, settings.num_rounds)
    lines = [
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
        f"{before['load_average']}, after {environment()['load_average']}; {settings.num_rounds} interleaved rounds; "
        f"rank {settings.rank} on every module.",
        "",
        "| streams | adapters | grouped, tokens/s | grouped, float32 | merged | merged / grouped | / in float32 |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        if case.system == MERGED:
            merged, grouped, plain = (values[case._replace(system=name)] for name in (MERGED, GROUPED, IN_FLOAT32))
            cells = [f"{spread(one).median:.1f}" for one in (grouped, plain, merged)]
            cells += [str(ratios(merged, other)) for other in (grouped, plain)]
            lines.append(f"| {case.num_streams} | {case.num_adapters} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _decoders(settings: Settings, checkpoint: Checkpoint, paths: list[Path]) -> dict[str, EngineDecoder]:
    most = max(settings.streams)
    length = settings.num_prompt_tokens + settings.num_tokens
    weight_dtypes: dict[str, WeightDtype] = {GROUPED: "auto", IN_FLOAT32: "float32", MERGED: "auto"}
    adapters = [read_adapter(path, checkpoint.spec) for path in paths]
    found = {}
    for name, weight_dtype in weight_dtypes.items():
        config = EngineConfig(
            cpu=CpuConfig(num_threads=settings.num_threads, weight_dtype=weight_dtype),
            lora_pool_rows=2 * len(paths) * max(8, settings.rank),
            num_kv_blocks=most * (-(-length // 16) + 1),
            max_num_seqs=most,
            max_model_len=length,
            enable_prefix_caching=False,
            target_step_ms=0,
            merged_adapter=str(paths[0]) if name == MERGED else "",
        )
        found[name] = EngineDecoder(new_engine(checkpoint, config), adapters)
    return found


def main() -> None:
    """Command line."""
    defaults = Settings(Path())
    parser = argparse.ArgumentParser(description="Merged weights compared with adapters.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base")
    parser.add_argument("--streams", type=numbers, default=defaults.streams)
    parser.add_argument("--adapters", type=numbers, default=defaults.adapters)
    parser.add_argument("--rank", type=int, default=defaults.rank)
    parser.add_argument("--tokens", type=int, default=defaults.num_tokens)
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds)
    options = parser.parse_args()
    print(
        run(
            Settings(
                resolve_model(options.model),
                tuple(options.streams),
                tuple(options.adapters),
                options.rank,
                num_tokens=options.tokens,
                num_rounds=options.rounds,
            )
        )
    )


if __name__ == "__main__":
    main()
