"""Simulates the same traffic on different fleets, on a virtual clock: the service's own decisions, measured times.

Prints Markdown. `policies` compares placement policies in Dynamo's scenarios, with ranks and with a tenant that floods,
`--write-factor 30` with loads that cost so many times more, `--plot FILE` as a picture; `alternating` has the load that
Dynamo's allocator cannot follow; `prefixes` shows the gain of `placement.prefix_affinity`; `scaling` compares the
service's autoscaling with Ray's, and `starts` shows the effect of a replica's start-up time in a crowd; `scale` runs a
large fleet and prints how long that took.

    python -m load_tests.simulate policies --seeds 20
    python -m load_tests.simulate scale --replicas 1000 --adapters 100000 --requests 1000000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from app.config import PlacementConfig
from app.deployments.placement.autoscaling import Objective
from app.simulation.costs import DEFAULT_COSTS, Costs, read_costs
from app.simulation.fleet import Plan, simulate
from app.simulation.replica import ReplicaSize
from app.simulation.result import Interval, intervals
from app.simulation.scaling import QueueLength, Scaling
from app.simulation.traffic import Traffic
from load_tests.simulate.scenarios import CROWDS_S, SCENARIOS, alternating, diurnal, flash_crowd, large, shared_prefixes

POLICIES = ("sticky", "rendezvous", "round_robin", "traffic_weighted", "rank_aware", "min_cost_flow", "least_loaded")
#: The service's own policy with the delays of configs/serve-autoscale.yaml; Ray's as it comes, and tuned to the same.
SCALINGS = {
    "adapter demand": Scaling(1, 12, Objective(), upscale_delay_s=2.0, downscale_delay_s=30.0),
    "Ray's, its defaults": Scaling(1, 12, QueueLength(), upscale_delay_s=30.0, downscale_delay_s=600.0),
    "Ray's, 4 requests, our delays": Scaling(
        1, 12, QueueLength(4.0, 11.0), upscale_delay_s=2.0, downscale_delay_s=30.0
    ),
    "Ray's, 8 requests, our delays": Scaling(
        1, 12, QueueLength(8.0, 11.0), upscale_delay_s=2.0, downscale_delay_s=30.0
    ),
}
#: Four slots, like Dynamo's workers; and the rows of four adapters of rank 64, for traffic with ranks.
FOUR_SLOTS = ReplicaSize(lora_pool_rows=64, rank_alignment=16, max_loras=5)
ROWS_256 = ReplicaSize(lora_pool_rows=256, rank_alignment=8, max_loras=33)
COLUMNS = {
    "hit_rate": "hit rate",
    "loads_per_1000": "loads / 1,000",
    "route_changes": "route changes",
    "imbalance": "imbalance",
    "ticks_over": "s above capacity",
    "ttft_p99_hot_s": "TTFT p99 hot, s",
    "ttft_p99_warm_s": "warm",
    "ttft_p99_tail_s": "tail",
    "jain": "Jain",
}


def summaries(make: Callable[[np.random.Generator], Traffic], plan: Plan, num_seeds: int) -> list[Mapping[str, float]]:
    """Summaries of one simulation per seed, from 0 on, each with its own traffic."""
    return [simulate(make(np.random.default_rng(seed)), plan, seed).summary() for seed in range(num_seeds)]


def simulate_policies(names: Sequence[str], num_seeds: int, costs: Costs) -> dict[str, dict[str, dict[str, Interval]]]:
    """Scenario -> policy -> number -> interval: 8 replicas, 100 adapters."""
    found: dict[str, dict[str, dict[str, Interval]]] = {}
    for name in names:
        size = ROWS_256 if name == "ranks" else FOUR_SLOTS
        found[name] = {}
        for policy in POLICIES:
            plan = Plan(8, costs, size, PlacementConfig(policy=policy))
            found[name][policy] = intervals(summaries(SCENARIOS[name], plan, num_seeds))
    return found


def compare_policies(names: Sequence[str], num_seeds: int, costs: Costs, picture: Path | None = None) -> str:
    """A table per scenario, and all of it as an SVG file in `picture`."""
    found = simulate_policies(names, num_seeds, costs)
    if picture is not None:
        from load_tests.simulate.plot import plot_policies

        plot_policies(found, picture)
    return "\n\n".join(f"**{name}**\n\n{table(rows)}" for name, rows in found.items())


def compare_alternating(num_seeds: int, costs: Costs) -> str:
    """Four adapters, eight slots; the two that get requests change every tick."""
    size = ReplicaSize(lora_pool_rows=32, rank_alignment=16, max_loras=3)
    rows = {}
    for policy in POLICIES:
        plan = Plan(4, costs, size, PlacementConfig(policy=policy))
        rows[policy] = intervals(summaries(alternating, plan, num_seeds))
    return table(rows)


def compare_prefixes(num_seeds: int, costs: Costs) -> str:
    """Requests for the base with shared prefixes: 8 replicas, different numbers of prefixes and loads."""
    columns = {
        "cached_share": "prompt tokens cached",
        "imbalance": "imbalance",
        "ttft_p50_s": "TTFT p50, s",
        "ttft_p99_s": "p99, s",
    }
    rows = {}
    for num_prefixes, rate in ((20, 10.0), (200, 7.0), (200, 10.0), (2000, 7.0)):
        for is_on in (False, True):
            plan = Plan(8, costs, placement=PlacementConfig(prefix_affinity=is_on))
            make = partial(shared_prefixes, num_prefixes=num_prefixes, rate=rate)
            found = summaries(make, plan, num_seeds)
            rows[f"{num_prefixes} prefixes, {rate:g} requests/s, {'on' if is_on else 'off'}"] = intervals(found)
    return table(rows, columns, "traffic, prefix_affinity")


def compare_start_times(num_seeds: int, costs: Costs) -> str:
    """Replicas follow a flash crowd from 1 to 8; each takes so long to start."""
    columns = {
        "ttft_p50_s": "TTFT p50, s",
        "ttft_p99_s": "p99, s",
        "scalings": "decisions",
        "replicas_mean": "replicas",
    }
    rows = {}
    for start_s in (2.0, 10.0, 30.0, 60.0, 120.0):
        plan = Plan(1, replace(costs, start_s=start_s), scaling=Scaling(1, 8))
        found = summaries(flash_crowd, plan, num_seeds)
        assert not any(summary["lost"] for summary in found), "no request may be lost"
        rows[f"{start_s:.0f} s"] = intervals(found)
    return table(rows, columns, "start")


def compare_scaling(num_seeds: int, costs: Costs) -> str:
    """The service's autoscaling compared with Ray's: 2 replicas, then 1 to 12. The two busiest adapters are pinned."""
    columns = {
        "reaction_s": "s to react",
        "scalings": "decisions",
        "replicas_mean": "replicas",
        "replicas_max": "at most",
        "loads_per_1000": "loads / 1,000",
        "pinned_loads": "pinned reloaded",
        "lost": "lost",
        "ttft_p50_s": "TTFT p50, s",
        "ttft_p99_s": "p99, s",
    }
    parts = []
    for name, make, changes_s in (("flash crowd", flash_crowd, CROWDS_S), ("diurnal", diurnal, ())):
        rows = {}
        for policy, scaling in SCALINGS.items():
            plan = Plan(2, costs, scaling=scaling, pinned=(0, 1))
            found = []
            for seed in range(num_seeds):
                result = simulate(make(np.random.default_rng(seed)), plan, seed)
                reactions_s = [result.reaction_s(change_s) for change_s in changes_s]
                found.append(result.summary() | {"reaction_s": float(np.mean(reactions_s or [0.0]))})
            rows[policy] = intervals(found)
        shown = {key: text for key, text in columns.items() if changes_s or key != "reaction_s"}
        parts.append(f"**{name}**\n\n" + table(rows, shown))
    return "\n\n".join(parts)


def run_large(num_replicas: int, num_adapters: int, num_requests: int, rate: float, costs: Costs) -> str:
    traffic = large(np.random.default_rng(0), num_requests, num_adapters, rate)
    started_s = time.perf_counter()
    result = simulate(traffic, Plan(num_replicas, costs, host_bytes=1 << 40), 0)
    spent_s = time.perf_counter() - started_s
    summary = result.summary()
    return (
        f"{num_requests} requests for {num_adapters} adapters on {num_replicas} replicas: {spent_s:.1f} s, "
        f"{1e6 * spent_s / num_requests:.0f} us a request; hit rate {summary['hit_rate']:.3f}, "
        f"TTFT p50 {summary['ttft_p50_s']:.3f} s, p99 {summary['ttft_p99_s']:.3f} s, lost {summary['lost']:.0f}"
    )


def table(
    rows: Mapping[str, Mapping[str, Interval]], columns: Mapping[str, str] = COLUMNS, first: str = "policy"
) -> str:
    """Markdown: a line per row, mean and interval of 95 %."""
    lines = [f"| {first} | {' | '.join(columns.values())} |", "|---|" + "---:|" * len(columns)]
    for name, values in rows.items():
        lines.append(f"| {name} | {' | '.join(str(values[key]) for key in columns)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="load_tests.simulate", description=__doc__, formatter_class=_Raw)
    parser.add_argument("what", choices=("policies", "alternating", "prefixes", "scaling", "starts", "scale"))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="of `policies`; else all of them")
    parser.add_argument("--plot", type=Path, help="of `policies`: draw them into this SVG file, too (needs matplotlib)")
    parser.add_argument("--costs", type=Path, default=DEFAULT_COSTS, help="what steps and loads take (JSON)")
    parser.add_argument("--write-factor", type=float, default=1.0, help="writing adapters takes so many times as long")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=4000.0, help="requests a second, of `scale`")
    arguments = parser.parse_args(argv)
    costs = read_costs(arguments.costs)
    costs = replace(costs, row_write_s=costs.row_write_s * arguments.write_factor)
    print(f"Times of {costs.machine}.\n")
    match arguments.what:
        case "policies":
            print(compare_policies(arguments.scenario or [*SCENARIOS], arguments.seeds, costs, arguments.plot))
        case "alternating":
            print(compare_alternating(arguments.seeds, costs))
        case "prefixes":
            print(compare_prefixes(arguments.seeds, costs))
        case "scaling":
            print(compare_scaling(arguments.seeds, costs))
        case "starts":
            print(compare_start_times(arguments.seeds, costs))
        case _:
            print(run_large(arguments.replicas, arguments.adapters, arguments.requests, arguments.rate, costs))


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    main()
