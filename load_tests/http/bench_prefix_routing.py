"""Conversations with shared prefixes on two real replicas, with `placement.prefix_affinity` on and off.

Two services that differ in this setting only are started as `make serve` does, each with two engine replicas of one
thread. Prints the cached fraction of prompt tokens, time to the first token, and the busier replica's CPU time over the
mean of both; ratios within a round. In a round both get the same new requests in turns. A conversation's next prompt is
the last one and more words. Conversations are for the base, whose requests may go to any replica, and share their first
words with others.

    python -m load_tests.http.bench_prefix_routing --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from app.cli.config_file import IMPORT_PATH, read_settings
from load_tests.http.client import Endpoint, Outcome, closed_loop
from load_tests.http.lengths import words
from load_tests.http.workload import PlannedRequest
from load_tests.process_tree import process_seconds, processes
from load_tests.service import ROOT, Service, free_port, serve_arguments
from load_tests.stats import environment, ratios, rounds, spread

ON, OFF = "on", "off"
NUM_REPLICAS = 2
NUM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Talk:
    """A round's conversations: `num_prefixes` texts of `prefix_words` words are shared by `num_conversations`, each of
    which has `num_turns` of `turn_words` words; `num_streams` requests are open at a time.
    """

    num_prefixes: int = 16
    prefix_words: int = 256
    num_conversations: int = 32
    num_turns: int = 4
    turn_words: int = 24
    num_streams: int = 4


class RoundResult(NamedTuple):
    """One round: the cached fraction of prompt tokens, seconds to the first token, and imbalance."""

    cached: float
    p50_s: float
    p99_s: float
    imbalance: float


def conversations(talk: Talk, model: str, seed: int) -> list[PlannedRequest]:
    """All turns of all conversations, turn by turn, in another order each time; the same for the same seed."""
    rng = np.random.default_rng(seed)
    prefixes = [words(talk.prefix_words, rng) for _ in range(talk.num_prefixes)]
    said = [prefixes[number % talk.num_prefixes] for number in range(talk.num_conversations)]
    requests: list[PlannedRequest] = []
    for _ in range(talk.num_turns):
        for number in rng.permutation(talk.num_conversations).tolist():
            said[number] += " " + words(talk.turn_words, rng)
            requests.append(PlannedRequest(len(requests), 0.0, model, "bench", said[number], NUM_TOKENS))
    return requests


@dataclass
class Bench:
    """One of the services, measured round by round. `engine_seconds`: CPU time of each engine replica until now."""

    url: str
    engine_seconds: Callable[[], Mapping[int, float]]
    model: str
    talk: Talk
    results: list[RoundResult] = field(default_factory=list)

    def measure(self) -> float:
        """Run a round; returns the cached fraction of prompt tokens. Raises RuntimeError when a request fails."""
        before = self.engine_seconds()
        outcomes = self._ask(conversations(self.talk, self.model, seed=1 + len(self.results)))
        used_s = [seconds - before[pid] for pid, seconds in self.engine_seconds().items()]
        first_s = [outcome.ttft_s for outcome in outcomes]
        cached = sum(outcome.cached_tokens for outcome in outcomes) / sum(o.prompt_tokens for o in outcomes)
        p50_s, p99_s = (float(np.percentile(first_s, which)) for which in (50, 99))
        self.results.append(RoundResult(cached, p50_s, p99_s, max(used_s) / float(np.mean(used_s))))
        return cached

    def warm_up(self) -> None:
        """A short talk, which is not counted: connections, memory."""
        self._ask(conversations(Talk(num_prefixes=2, num_conversations=4, num_turns=1), self.model, seed=0))

    def _ask(self, requests: Sequence[PlannedRequest]) -> list[Outcome]:
        endpoint = Endpoint(self.url, extra_body={"ignore_eos": True})
        outcomes = asyncio.run(closed_loop(endpoint, requests, self.talk.num_streams))
        for outcome in outcomes:
            if outcome.error is not None:
                raise RuntimeError(f"{outcome.model}: {outcome.error}")
        return outcomes


def engine_seconds(session_id: int) -> dict[int, float]:
    """CPU time of each engine replica, by process id, of the service in this session."""
    return {pid: process_seconds(pid) for pid in processes(session_id)["engine"]}


def settings(config: Path, folder: Path, num_kv_blocks: int, *, prefix_affinity: bool) -> Path:
    """The configuration with two replicas of one thread, no adapters, and this placement; a file in `folder`."""
    document = yaml.safe_load(config.read_text(encoding="utf-8"))
    application = next(item for item in document["applications"] if item["import_path"] == IMPORT_PATH)
    arguments = application["args"]
    arguments["adapters"] = {}
    arguments.setdefault("placement", {}).update(prefix_affinity=prefix_affinity)
    arguments.setdefault("engine", {}).update(num_kv_blocks=num_kv_blocks, cpu={"num_threads": 1})
    options = {"num_replicas": NUM_REPLICAS, "ray_actor_options": {"num_cpus": 0.5}}
    application["deployments"] = [
        {"name": "Ingress", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
        {"name": "EngineReplica", **options},
    ]
    path = folder / f"prefix-aware-{prefix_affinity}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def table(results_of: Mapping[str, Sequence[RoundResult]]) -> str:
    """What was measured, in Markdown: medians over rounds, and ratios of one round's values."""
    lines = [
        "| `prefix_affinity` | prompt tokens cached | TTFT p50, s | p99, s | imbalance |",
        "|---|---:|---:|---:|---:|",
    ]
    for case in (OFF, ON):
        lines.append(
            f"| {case} | {' | '.join(str(spread(values)) for values in zip(*results_of[case], strict=True))} |"
        )
    pairs = zip(zip(*results_of[ON], strict=True), zip(*results_of[OFF], strict=True), strict=True)
    lines.append(f"| {ON} / {OFF} | {' | '.join(str(ratios(on, off)) for on, off in pairs)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "serve.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-blocks", type=int, default=320, help="of 16 tokens, of each replica")
    given = parser.parse_args()
    machine: Any = environment()
    model, talk = read_settings(given.config).model.name, Talk()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        services = {}
        for case in (OFF, ON):
            path = settings(given.config, Path(temporary), given.kv_blocks, prefix_affinity=case == ON)
            port = free_port()
            services[case] = stack.enter_context(Service(serve_arguments(str(path), port))), port
        benches = {}
        for case, (service, port) in services.items():
            service.wait_for("Ready after")
            benches[case] = Bench(
                f"http://127.0.0.1:{port}/v1", partial(engine_seconds, service.process.pid), model, talk
            )
            benches[case].warm_up()
        rounds({case: bench.measure for case, bench in benches.items()}, given.rounds)
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}. {talk}, {given.kv_blocks} KV blocks a "
        f"replica, {given.rounds} rounds.\n\n{table({case: bench.results for case, bench in benches.items()})}"
    )


if __name__ == "__main__":
    main()
