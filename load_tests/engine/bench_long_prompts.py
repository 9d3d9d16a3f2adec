"""What long prompts do to running streams: gaps between their tokens, and how long the prompts themselves take.

In: a base model and sizes. Out: Markdown on stdout; ratios of one round of one run. The engine alone. Streams decode;
at even distances prompts arrive, whose prefill shares steps with them. Compared: nothing arrives, and prompts arrive,
with each of some values of `engine.target_step_ms`; 0 is prefill as `max_num_batched_tokens` alone bounds it.

    python -m load_tests.engine.bench_long_prompts --streams 8 --prompt-tokens 1024 --step-ms 0,100
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from app.engine.config import CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.request import GenerateRequest, SamplingParams
from load_tests.stats import environment, ratios, rounds, spread

#: Tokens of each stream's own prompt.
_STREAM_PROMPT = 16


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    model: Path
    num_streams: int = 8
    prompt_tokens: int = 1024
    num_prompts: int = 2
    seconds_apart: float = 4.0
    step_ms: tuple[int, ...] = (0, 100)
    num_rounds: int = 3
    num_threads: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Seen:
    """One case in one round: seconds between tokens of the streams, to each prompt's first token; tokens per second."""

    p99_s: float
    longest_s: float
    first_token_s: float
    tokens_per_s: float


class Traffic:
    """Streams and prompts for one engine."""

    def __init__(self, settings: Settings, engine: Engine, vocab_size: int) -> None:
        self._settings = settings
        self._engine = engine
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(settings.seed)
        self._count = 0

    def _submit(self, prompt_tokens: int, num_tokens: int) -> str:
        self._count += 1
        prompt = tuple(self._rng.integers(0, self._vocab_size, prompt_tokens).tolist())
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self._engine.submit(GenerateRequest(f"r{self._count}", "bench", prompt, sampling))
        return f"r{self._count}"

    def _submit_stream(self) -> str:
        return self._submit(_STREAM_PROMPT, self._engine.max_model_len - _STREAM_PROMPT)

    def run(self, with_prompts: bool) -> Seen:
        """Streams for as long as prompts keep coming."""
        settings, engine = self._settings, self._engine
        streams = {self._submit_stream() for _ in range(settings.num_streams)}
        for _ in range(8):
            engine.step()
        gaps_s: list[float] = []
        arrived_s: dict[str, float] = {}
        first_s: list[float] = []
        started_s = last_s = time.perf_counter()
        end_s = settings.num_prompts * settings.seconds_apart
        while last_s - started_s < end_s or len(first_s) < len(arrived_s):
            due = int((last_s - started_s) / settings.seconds_apart) + 1
            if with_prompts and len(arrived_s) < min(due, settings.num_prompts):
                arrived_s[self._submit(settings.prompt_tokens, 1)] = last_s
            chunks = engine.step()
            now_s = time.perf_counter()
            gaps_s.append(now_s - last_s)
            last_s = now_s
            for chunk in chunks:
                if chunk.error is not None:
                    raise chunk.error
                if chunk.request_id in arrived_s:
                    first_s.append(now_s - arrived_s[chunk.request_id])
                elif chunk.finish_reason is not None:  # nothing more fits into its context
                    streams.remove(chunk.request_id)
                    streams.add(self._submit_stream())
        for request_id in streams:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        return Seen(
            float(np.percentile(gaps_s, 99)),
            max(gaps_s),
            float(np.mean(first_s)) if first_s else 0.0,
            settings.num_streams * len(gaps_s) / (last_s - started_s),
        )


def run(settings: Settings) -> str:
    """Measure everything; the Markdown."""
    before = environment()
    checkpoint = load_checkpoint(settings.model)
    traffic = {}
    for step_ms in settings.step_ms:
        length = min(max(settings.prompt_tokens + 16, 2048), checkpoint.spec.max_positions)
        config = EngineConfig(
            cpu=CpuConfig(num_threads=settings.num_threads),
            lora_pool_rows=0,
            target_step_ms=step_ms,
            max_model_len=length,
            num_kv_blocks=(settings.num_streams + settings.num_prompts) * (-(-length // 16) + 1),
            enable_prefix_caching=False,
            speculative_decoding="off",
        )
        traffic[step_ms] = Traffic(
            settings, Engine(load_backend(checkpoint, config), config), checkpoint.spec.vocab_size
        )
    seen: dict[int | None, list[Seen]] = {case: [] for case in (None, *settings.step_ms)}

    def one(case: int | None) -> float:
        of = traffic[settings.step_ms[0] if case is None else case]
        seen[case].append(of.run(with_prompts=case is not None))
        return 0.0

    traffic[settings.step_ms[0]].run(with_prompts=True)
    rounds({case: partial(one, case) for case in seen}, settings.num_rounds)
    idle = seen[None]
    lines = [
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
        f"{before['load_average']}, after {environment()['load_average']}; {settings.num_rounds} interleaved rounds; "
        f"{settings.num_streams} streams, beside them {settings.num_prompts} prompts of {settings.prompt_tokens} "
        f"tokens, {settings.seconds_apart:g} s apart.",
        "",
        "| | p99 of the gap between tokens, ms | longest, ms | longest / nothing arrives "
        "| streams' tokens/s / nothing arrives | a prompt's first token, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case, values in seen.items():
        name = "nothing arrives" if case is None else f"prompts, target_step_ms {case}"
        p99, longest = (spread([getattr(each, key) * 1e3 for each in values]).median for key in ("p99_s", "longest_s"))
        longest_ratio = ratios([each.longest_s for each in values], [each.longest_s for each in idle])
        speed_ratio = ratios([each.tokens_per_s for each in values], [each.tokens_per_s for each in idle])
        first = "" if case is None else str(spread([each.first_token_s for each in values]))
        lines.append(f"| {name} | {p99:.0f} | {longest:.0f} | {longest_ratio} | {speed_ratio} | {first} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    defaults = Settings(Path())
    parser = argparse.ArgumentParser(description="What long prompts do to running streams.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--streams", type=int, default=defaults.num_streams)
    parser.add_argument("--prompt-tokens", type=int, default=defaults.prompt_tokens)
    parser.add_argument("--prompts", type=int, default=defaults.num_prompts, help="prompts that arrive in a round")
    parser.add_argument("--seconds-apart", type=float, default=defaults.seconds_apart)
    parser.add_argument("--step-ms", default="0,100", help="values of engine.target_step_ms, with commas")
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(
        run(
            Settings(
                model=resolve_model(given.model),
                num_streams=given.streams,
                prompt_tokens=given.prompt_tokens,
                num_prompts=given.prompts,
                seconds_apart=given.seconds_apart,
                step_ms=tuple(int(value) for value in given.step_ms.split(",")),
                num_rounds=given.rounds,
                num_threads=given.threads,
                seed=given.seed,
            )
        )
    )


if __name__ == "__main__":
    main()
