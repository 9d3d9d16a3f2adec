"""Seconds from `make serve` to a client's first answer, by stage, on a machine that has run it before.

Prints the median (lowest to highest) of several starts, and the CPU seconds of each kind of process up to the first
answer. The service is started as `make serve` starts it, with its own ports and Ray; one start that does not count
fetches the model and compiles what is missing.

    python -m load_tests.http.bench_start --starts 5
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from app.cli.config_file import read_settings
from load_tests.http.client import Endpoint, closed_loop
from load_tests.http.workload import PlannedRequest
from load_tests.process_tree import cpu_seconds
from load_tests.service import ROOT, Service, free_port, serve_arguments
from load_tests.stats import environment, spread

#: What the service says when a stage begins.
STAGES = (
    ("imports, checks", "starting Ray"),
    ("Ray", "starting the service"),
    ("Serve's controller", "loading the model"),
    ("replicas, model", "Ready after"),
)
FIRST_ANSWER = "first answer"


class Start(NamedTuple):
    """Seconds of the stages, in order, and of CPU by role."""

    stages: Mapping[str, float]
    cpu: Mapping[str, float]


def measure(config: str, base_name: str) -> Start:
    """One start. Raises RuntimeError when it fails."""
    port = free_port()
    with Service(serve_arguments(config, port)) as service:
        before, stages = 0.0, {}
        for name, text in STAGES:
            now = service.wait_for(text)
            stages[name], before = now - before, now
        started = time.perf_counter()
        request = PlannedRequest(
            index=0, arrival_s=0.0, model=base_name, tenant="bench", prompt="The capital of France is", max_tokens=8
        )
        (outcome,) = asyncio.run(closed_loop(Endpoint(f"http://127.0.0.1:{port}/v1"), [request], 1))
        if outcome.error is not None:
            raise RuntimeError(f"the first request failed: {outcome.error}")
        stages[FIRST_ANSWER] = time.perf_counter() - started
        return Start(stages, cpu_seconds(service.process.pid))


def run(config: str, num_starts: int) -> str:
    """Measure; the Markdown tables."""
    base_name = read_settings(ROOT / config).model.name
    measure(config, base_name)
    starts = [measure(config, base_name) for _ in range(num_starts)]
    lines = ["| stage | seconds |", "|---|---:|"]
    lines += [f"| {name} | {spread([start.stages[name] for start in starts])} |" for name in starts[0].stages]
    lines.append(f"| together | {spread([sum(start.stages.values()) for start in starts])} |")
    roles = sorted({name for start in starts for name in start.cpu})
    lines += ["", "| process | CPU seconds |", "|---|---:|"]
    lines += [f"| {name} | {spread([start.cpu.get(name, 0.0) for start in starts])} |" for name in roles]
    lines.append(f"| together | {spread([sum(start.cpu.values()) for start in starts])} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Seconds from `make serve` to the first answer.")
    parser.add_argument("--config", default="configs/serve.yaml", help="relative to the repository's root")
    parser.add_argument("--starts", type=int, default=3)
    arguments = parser.parse_args()
    machine = environment()
    table = run(arguments.config, arguments.starts)
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}; {arguments.starts} starts after one that "
        f"does not count.\n\n{table}"
    )


if __name__ == "__main__":
    main()
