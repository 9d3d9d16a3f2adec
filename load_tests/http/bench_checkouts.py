"""Whether a change made the service faster or slower: this checkout and another one, in turns over HTTP.

Takes the folder of the other checkout (`git worktree add`), and a settings file that both read. Prints tokens/s of
both, from the first request to the last token, and CPU time per token of all their processes. Ratios are within a round
(`stats.py`). Both services run at the same time, with this Python, and the idle one uses next to no CPU. Prompts are
new in every round.

    python -m load_tests.http.bench_checkouts --other ../old --config configs/serve.yaml --rounds 8
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.cli.config_file import read_settings
from app.config import AppConfig
from load_tests.http.client import Endpoint, answers_s
from load_tests.http.lengths import words
from load_tests.process_tree import cpu_seconds
from load_tests.service import ROOT, Service, free_port, serve_arguments
from load_tests.stats import environment, numbers, ratios, rounds, spread

SIDES = ("this", "other")


class Case(NamedTuple):
    """Which side, base only or base and adapters in turn, how many streams."""

    side: str
    with_adapters: bool
    num_streams: int


class Bench:
    """Two services by side: their address, and the session of their processes."""

    def __init__(
        self, config: AppConfig, services: dict[str, tuple[str, int]], num_words: int, num_tokens: int, per_stream: int
    ) -> None:
        self._base = config.model.name
        self._models = [self._base, *(adapter.name for adapter in config.adapters.preload)]
        self._services = services
        self._num_words, self._num_tokens, self._per_stream = num_words, num_tokens, per_stream
        self._rng = np.random.default_rng(0)
        #: CPU microseconds a token, one value per run.
        self.cpu_us: defaultdict[Case, list[float]] = defaultdict(list)

    def measure(self, case: Case) -> float:
        """Tokens per second over the whole run. Raises RuntimeError when a request fails."""
        url, session_id = self._services[case.side]
        models = self._models if case.with_adapters else [self._base]
        num_requests = case.num_streams * self._per_stream
        prompts = [words(self._num_words, self._rng) for _ in range(num_requests)]
        before = sum(cpu_seconds(session_id).values())
        asked = [models[index % len(models)] for index in range(num_requests)]
        endpoint = Endpoint(url, extra_body={"ignore_eos": True})
        seconds = answers_s(endpoint, asked, prompts, self._num_tokens, case.num_streams)
        num_tokens = num_requests * self._num_tokens
        self.cpu_us[case].append((sum(cpu_seconds(session_id).values()) - before) / num_tokens * 1e6)
        return num_tokens / seconds


def table(bench: Bench, streams: tuple[int, ...], num_rounds: int) -> str:
    """Measure, and say it in Markdown."""
    cases = [Case(side, lora, n) for n in streams for lora in (False, True) for side in SIDES]
    for case in cases:
        bench.measure(case)  # connections, adapters, compiled code
    bench.cpu_us.clear()
    values = rounds({case: partial(bench.measure, case) for case in cases}, num_rounds)
    lines = [
        "| streams | adapters | other, tokens/s | this | this / other | CPU per token, this / other |",
        "|---:|---|---:|---:|---|---|",
    ]
    for n in streams:
        for lora in (False, True):
            this, other = (Case(side, lora, n) for side in SIDES)
            used = "base and the adapters of the configuration in turn" if lora else "base"
            cells = (
                str(n),
                used,
                f"{spread(values[other]).median:.1f}",
                f"{spread(values[this]).median:.1f}",
                str(ratios(values[this], values[other])),
                str(ratios(bench.cpu_us[this], bench.cpu_us[other])),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="This checkout and another, in turns over HTTP.")
    parser.add_argument("--other", type=Path, required=True, help="the other checkout's folder")
    parser.add_argument("--config", type=Path, default=Path("configs/serve.yaml"), help="what both are started from")
    parser.add_argument("--streams", type=numbers, default=(8,))
    parser.add_argument("--prompt-words", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--per-stream", type=int, default=3, help="requests a stream, one after the other")
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    settings, machine = given.config.resolve(), environment()
    with ExitStack() as stack:
        services: dict[str, tuple[str, int]] = {}
        for side, checkout in zip(SIDES, (ROOT, given.other.resolve()), strict=True):
            port = free_port()
            service = stack.enter_context(Service(serve_arguments(str(settings), port), checkout=checkout))
            service.wait_for("Ready after")
            services[side] = (f"http://127.0.0.1:{port}/v1", service.process.pid)
        bench = Bench(read_settings(settings), services, given.prompt_words, given.tokens, given.per_stream)
        print(table(bench, given.streams, given.rounds))
    print(
        f"\n{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}."
    )


if __name__ == "__main__":
    main()
