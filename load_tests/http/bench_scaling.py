"""Real replicas under a crowd and a day, scaled by adapter demand and by Ray Serve's own policy.

Prints per traffic and policy: seconds until another replica is started, numbers of replicas, requests lost, adapters
written to devices, pinned ones among them again, time to first token; and how the number of replicas changed. Each
policy has its own service, as `polylora serve` starts it, with a tiny random model, and gets the same requests over
HTTP, one after the other. A replica has room for `Fleet.num_fitting` adapters; demand for more of them needs more
replicas, and takes many processes, but little of the CPU. All counts are taken from outside: processes, answers and
`GET /v1/loras`.

    python -m load_tests.http.bench_scaling
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import yaml

from load_tests.http.client import Endpoint, Outcome, open_loop
from load_tests.http.lengths import words
from load_tests.http.workload import PlannedRequest
from load_tests.process_tree import processes
from load_tests.service import Service, free_port, serve_arguments
from load_tests.stats import environment
from tests.e2e.tiny import save_adapter, save_tiny_model

MODEL = "tiny"
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "adapter demand": {
        "policy_function": "app.deployments.placement.autoscaling:AdapterDemand",
        "policy_kwargs": {"forecast_s": 5.0, "scale_down_window_s": 20.0},
    },
    "Ray's own": {"policy_function": "ray.serve.autoscaling_policy:default_autoscaling_policy"},
}
DELAYS = {"look_back_period_s": 11, "upscale_delay_s": 1, "downscale_delay_s": 3}
MAX_REPLICAS = 4
#: How often replicas are counted.
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Fleet:
    """`num_adapters`, of which the first `num_pinned` are pinned; `num_fitting` have room on a replica.

    num_rows: what one adapter of `rank` takes of it; they change three modules of seven.
    """

    num_adapters: int = 26
    num_fitting: int = 8
    num_pinned: int = 2
    rank: int = 16
    num_rows: int = 8


class Phase(NamedTuple):
    """A period with one rate of requests for the first `num_adapters` adapters."""

    seconds: float
    rate: float
    num_adapters: int


CALM, CROWD = (4.0, 5), (16.0, 26)  # requests a second, and adapters that they ask for


def _hour(hour: int) -> Phase:
    """A phase of fifteen hours of ten seconds each, from night to noon and back."""
    part = (1 - math.cos(2 * math.pi * hour / 15)) / 2
    rate, num_adapters = (calm + part * (crowd - calm) for calm, crowd in zip(CALM, CROWD, strict=True))
    return Phase(10, rate, round(num_adapters))


#: Of traffic by its name; the last phase is long enough for the replicas to leave.
TRAFFIC: Mapping[str, Sequence[Phase]] = {
    "flash crowd": (Phase(20, *CALM), Phase(40, *CROWD), Phase(100, *CALM)),
    "day": (*map(_hour, range(16)), Phase(70, *CALM)),
}


@dataclass(frozen=True, slots=True)
class TrafficResult:
    """One traffic: answers, (seconds, replicas) at every look, and adapters that were written to devices.

    num_reloaded: writes of pinned adapters beyond one per replica.
    """

    outcomes: Sequence[Outcome]
    counts: Sequence[tuple[float, int]]
    num_loads: int
    num_reloaded: int


def requests(phases: Sequence[Phase], seed: int) -> list[PlannedRequest]:
    """Poisson arrivals; every adapter of a phase as likely; the same for the same seed."""
    rng = np.random.default_rng(seed)
    planned: list[PlannedRequest] = []
    began_s = 0.0
    for phase in phases:
        at_s = began_s + rng.exponential(1 / phase.rate)
        while at_s < began_s + phase.seconds:
            model = f"a{rng.integers(phase.num_adapters)}"
            planned.append(PlannedRequest(len(planned), at_s, model, "bench", words(8, rng), 16))
            at_s += rng.exponential(1 / phase.rate)
        began_s += phase.seconds
    return planned


def reaction_s(phases: Sequence[Phase], counts: Sequence[tuple[float, int]]) -> float:
    """Seconds from the greatest rise of the rate to the next additional replica; infinity if there was none."""
    rises = [after.rate - before.rate for before, after in pairwise(phases)]
    rise_s = sum(phase.seconds for phase in phases[: 1 + int(np.argmax(rises))])
    before = max((count for at_s, count in counts if at_s <= rise_s), default=0)
    return min((at_s for at_s, count in counts if at_s > rise_s and count > before), default=math.inf) - rise_s


def changes(counts: Sequence[tuple[float, int]]) -> list[int]:
    """The numbers of replicas in order, each change once."""
    return [count for count, _ in groupby(count for _, count in counts)]


def settings(folder: Path, fleet: Fleet, policy: Mapping[str, Any], port: int) -> Path:
    """A Serve application file in `folder`, where the model and the adapters are."""
    names = [f"a{index}" for index in range(fleet.num_adapters)]
    scaling = {"min_replicas": 1, "max_replicas": MAX_REPLICAS, **DELAYS, "policy": policy}
    if "policy_kwargs" not in policy:
        scaling["target_ongoing_requests"] = 2
    document = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "polylora",
                "route_prefix": "/",
                "import_path": "app.main:build",
                "args": {
                    "model": {"uri": str(folder / MODEL), "name": MODEL},
                    "engine": {
                        "cpu": {"num_threads": 1},
                        "num_kv_blocks": 512,
                        "lora_pool_rows": fleet.num_fitting * fleet.num_rows,
                    },
                    "adapters": {
                        "roots": [str(folder / "loras")],
                        "preload": [{"name": name, "path": name} for name in names],
                    },
                },
                "deployments": [
                    {"name": "Ingress", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
                    {
                        "name": "EngineReplica",
                        "ray_actor_options": {"num_cpus": 0.1},
                        "autoscaling_config": scaling,
                    },
                ],
            }
        ],
    }
    path = folder / f"{port}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@contextmanager
def counting(num_replicas: Callable[[], int]) -> Iterator[list[tuple[float, int]]]:
    """Count replicas every `LOOK_S` from now on, with the seconds since."""
    counts: list[tuple[float, int]] = []
    leave = threading.Event()
    began_s = time.perf_counter()

    def look() -> None:
        while not leave.wait(LOOK_S):
            counts.append((time.perf_counter() - began_s, num_replicas()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield counts
    finally:
        leave.set()
        thread.join()


def num_writes(url: str, num_adapters: int) -> int:
    """How often the first `num_adapters` adapters have been written to devices."""
    bodies = [httpx.get(f"{url}/v1/loras/a{index}", timeout=60).json() for index in range(num_adapters)]
    return sum(body["activity"]["loads"]["device"] for body in bodies)


def measure(url: str, session_id: int, fleet: Fleet, phases: Sequence[Phase]) -> TrafficResult:
    """Send the phases' requests to a service; replicas are counted by their processes."""
    pids = set(processes(session_id)["engine"])
    num_before = len(pids)

    def num_replicas() -> int:
        now = processes(session_id)["engine"]
        pids.update(now)
        return len(now)

    before, pinned_before = num_writes(url, fleet.num_adapters), num_writes(url, fleet.num_pinned)
    with counting(num_replicas) as counts:
        endpoint = Endpoint(f"{url}/v1", extra_body={"ignore_eos": True})
        outcomes = asyncio.run(open_loop(endpoint, requests(phases, seed=1)))
    num_loads = num_writes(url, fleet.num_adapters) - before
    num_reloaded = num_writes(url, fleet.num_pinned) - pinned_before - fleet.num_pinned * (len(pids) - num_before)
    return TrafficResult(outcomes, counts, num_loads, num_reloaded)


def row(policy: str, phases: Sequence[Phase], seen: TrafficResult) -> str:
    """A line of the table."""
    first_s = [outcome.ttft_s for outcome in seen.outcomes if outcome.chunk_s]
    lost = sum(outcome.error is not None for outcome in seen.outcomes)
    numbers = [count for _, count in seen.counts]
    reaction = reaction_s(phases, seen.counts)
    cells = (
        policy,
        "–" if math.isinf(reaction) else f"{reaction:.1f}",
        " → ".join(map(str, changes(seen.counts))),
        f"{float(np.mean(numbers)):.2f}",
        str(lost),
        f"{1000 * seen.num_loads / len(seen.outcomes):.0f}",
        str(seen.num_reloaded),
        *(f"{float(np.percentile(first_s, which)):.3f}" for which in (50, 99)),
    )
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| policy | s to react | replicas, in turn | mean | lost | loads / 1,000 | pinned written again | TTFT p50, s "
    "| p99, s |\n|---|---:|---|---:|---:|---:|---:|---:|---:|"
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", choices=TRAFFIC, action="append", help="else all of it")
    given = parser.parse_args()
    machine, fleet = environment(), Fleet()
    rows: dict[str, list[str]] = {name: [] for name in given.traffic or TRAFFIC}
    reports: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_tiny_model(folder / MODEL)
        for index in range(fleet.num_adapters):
            save_adapter(folder / "loras" / f"a{index}", rank=fleet.rank, seed=index)
        for policy, config in POLICIES.items():
            port = free_port()
            path = settings(folder, fleet, config, port)
            with Service(serve_arguments(str(path), port), {"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}) as service:
                service.wait_for("Ready after")
                url = f"http://127.0.0.1:{port}"
                for index in range(fleet.num_pinned):
                    body = {"base_model": MODEL, "lora_model": f"a{index}", "pin_lora": True}
                    httpx.post(f"{url}/v1/load_lora", json=body, timeout=300).raise_for_status()
                # What the first replica has written is reported.
                while num_writes(url, fleet.num_pinned) < fleet.num_pinned:
                    time.sleep(1.0)
                for name, lines in rows.items():
                    while len(processes(service.process.pid)["engine"]) > 1:
                        time.sleep(1.0)
                    lines.append(row(policy, TRAFFIC[name], measure(url, service.process.pid, fleet, TRAFFIC[name])))
                    print(name, lines[-1], flush=True)
                logs = service.folder.rglob("controller_*.log")
                reports += [line for log in logs for line in log.read_text().splitlines() if "are wanted" in line]
    print(
        f"\n{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}. {fleet}"
    )
    for name, lines in rows.items():
        print(f"\n**{name}**\n\n{HEAD}\n" + "\n".join(lines))
    print("\nWhat the controller's log said:\n\n" + "\n".join(f"    {line}" for line in reports))


if __name__ == "__main__":
    main()
