"""Gaps between the tokens of running streams over HTTP, while others make work.

In: a configuration, from which a service is started as `make serve` does, with random adapters instead of its own. Out:
Markdown on stdout. Streams of the base run; beside them nothing arrives, or adapters that the service has never seen
are registered from disk and asked, four at a time, or long prompts arrive. What counts are the gaps of the base's
streams while that goes on, or for three seconds of nothing; ratios are within a round. Client, readers of files and
engine share one machine, as on a laptop.

    python -m load_tests.http.bench_gaps --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np

from app.cli.config_file import read_settings
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import resolve_model
from load_tests.http.client import Endpoint, closed_loop
from load_tests.http.lengths import words
from load_tests.http.workload import PlannedRequest
from load_tests.random_adapters import write_random_adapters
from load_tests.service import ROOT, Service, free_port, serve_arguments, settings_with_adapters
from load_tests.stats import environment, ratios, rounds, spread

NOTHING, COLD, PROMPTS = "nothing arrives", "cold adapters arrive", "long prompts arrive"
#: Adapters, or prompts, of one round; adapters that arrive together; tokens of each answer of the streams.
NUM_ADAPTERS, TOGETHER, NUM_PROMPTS, NUM_TOKENS = 12, 4, 3, 200
#: Seconds that streams have run before anything counts, and that nothing arrives.
LEAD_S, NOTHING_S = 1.0, 3.0


@dataclass(frozen=True)
class Gaps:
    """One case in one round; seconds."""

    p99_s: float
    longest_s: float


class Bench:
    """A running service. All methods raise RuntimeError when a request fails."""

    def __init__(self, url: str, base_name: str, folders: list[Path], num_streams: int, num_words: int) -> None:
        self._endpoint = Endpoint(url, extra_body={"ignore_eos": True})
        self._base_name, self._unknown = base_name, iter(folders)
        self._num_streams, self._num_words = num_streams, num_words
        self._rng = np.random.default_rng(0)
        self.seen: dict[str, list[Gaps]] = {NOTHING: [], COLD: [], PROMPTS: []}

    def measure(self, case: str) -> float:
        """One case once, into `seen`; its p99 in seconds."""
        gaps = asyncio.run(self._measure(case))
        self.seen[case].append(gaps)
        return gaps.p99_s

    async def _measure(self, case: str) -> Gaps:
        stop = asyncio.Event()
        streams = [asyncio.create_task(self._stream(stop)) for _ in range(self._num_streams)]
        try:
            await asyncio.sleep(LEAD_S)
            begin_s = time.perf_counter()
            if case == COLD:
                for _ in range(NUM_ADAPTERS // TOGETHER):
                    await asyncio.gather(*(self._load_and_ask(next(self._unknown)) for _ in range(TOGETHER)))
            elif case == PROMPTS:
                for _ in range(NUM_PROMPTS):
                    await self._ask(self._base_name, self._num_words, 2)
            else:
                await asyncio.sleep(NOTHING_S)
            end_s = time.perf_counter()
        finally:
            stop.set()
            answers = await asyncio.gather(*streams)
        gaps_s = [
            to_s - from_s
            for answer_s in itertools.chain.from_iterable(answers)
            for from_s, to_s in itertools.pairwise(answer_s)
            if begin_s < to_s and from_s < end_s
        ]
        return Gaps(float(np.percentile(gaps_s, 99)), max(gaps_s))

    async def _stream(self, stop: asyncio.Event) -> list[list[float]]:
        """One answer after the other until `stop`; the times at which each one's tokens came."""
        answers_s = []
        while not stop.is_set():
            answers_s.append(await self._ask(self._base_name, 24, NUM_TOKENS))
        return answers_s

    async def _ask(self, model: str, num_words: int, num_tokens: int) -> list[float]:
        prompt = words(num_words, self._rng)
        request = PlannedRequest(
            index=0, arrival_s=0.0, model=model, tenant="bench", prompt=prompt, max_tokens=num_tokens
        )
        started_s = time.perf_counter()
        (outcome,) = await closed_loop(self._endpoint, [request], 1)
        if outcome.error is not None:
            raise RuntimeError(f"{model}: {outcome.error}")
        return [started_s + at_s for at_s in outcome.chunk_s]

    async def _load_and_ask(self, folder: Path) -> None:
        body = {"name": folder.name, "path": str(folder), "wait": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self._endpoint.url}/loras", json=body) as response,
        ):
            if response.status not in (200, 201):
                raise RuntimeError(f"{folder.name}: HTTP {response.status}: {(await response.text())[:200]}")
        await self._ask(folder.name, 2, 4)


def run(config: Path, rank: int, num_rounds: int, num_streams: int, num_words: int) -> str:
    """Measure; the Markdown table."""
    model = read_settings(config).model
    spec = load_checkpoint(resolve_model(model.uri), model.name).spec
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = NUM_ADAPTERS * (num_rounds + 1)
        folders = write_random_adapters(folder / "adapters", spec, count, [rank], seed=0, bf16=True)
        settings = settings_with_adapters(config, folder, {"roots": [str(folder / "adapters")]})
        port = free_port()
        with Service(serve_arguments(str(settings), port)) as service:
            service.wait_for("Ready after")
            bench = Bench(f"http://127.0.0.1:{port}/v1", model.name, folders, num_streams, num_words)
            for case in bench.seen:
                bench.measure(case)  # connections, compiled code
                bench.seen[case].clear()
            rounds({case: partial(bench.measure, case) for case in bench.seen}, num_rounds)
    lines = [
        "| | p99 of gaps, ms | / nothing arrives | longest gap, ms | / nothing arrives |",
        "|---|---:|---:|---:|---:|",
    ]
    idle = bench.seen[NOTHING]
    for case, seen in bench.seen.items():
        p99, longest = ([getattr(gaps, key) for gaps in seen] for key in ("p99_s", "longest_s"))
        p99_ratio = ratios(p99, [gaps.p99_s for gaps in idle])
        longest_ratio = ratios(longest, [gaps.longest_s for gaps in idle])
        lines.append(
            f"| {case} | {spread(p99).median * 1e3:.0f} | {p99_ratio} | {spread(longest).median * 1e3:.0f} "
            f"| {longest_ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Gaps between tokens over HTTP while others make work.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "serve.yaml")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=600, help="words of each long prompt")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    machine = environment()
    table = run(given.config, given.rank, given.rounds, given.streams, given.prompt_words)
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}. {given.streams} streams; {NUM_ADAPTERS} "
        f"adapters of rank {given.rank} over all projections in bf16, {TOGETHER} at a time, or {NUM_PROMPTS} prompts "
        f"of {given.prompt_words} words, one after the other; {given.rounds} rounds.\n\n{table}"
    )


if __name__ == "__main__":
    main()
