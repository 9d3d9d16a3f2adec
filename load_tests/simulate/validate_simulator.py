"""The simulator compared with real replicas on the same traces.

Real replicas run the traces (`load_tests.simulate.real_fleet`), and every step is recorded. Each trace is then
simulated with times that are fitted to the steps of the others (`load_tests.simulate.measure.fit`), which were run
before and after it, and several times: whether an adapter in demand gets another replica a second sooner depends on
when replicas report, and p99 on that. What is compared was not fitted. Times are CPU seconds; but other work on the
machine makes steps uneven.

    python -m load_tests.simulate.validate_simulator --replicas 2 --traces 3 --seconds 120
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.simulation.costs import read_costs
from app.simulation.fleet import Plan, simulate
from app.simulation.replica import ReplicaSize
from app.simulation.result import Result, percentile
from app.simulation.traffic import Traffic
from load_tests.simulate.measure import fit
from load_tests.simulate.real_fleet import CONFIG, RANKS_PER_ROW, FleetResult, make_adapters, run_real, trace

SIZE = ReplicaSize(
    max_num_seqs=CONFIG.max_num_seqs,
    lora_pool_rows=RANKS_PER_ROW * CONFIG.lora_pool_rows,  # traffic has ranks, and every eight are a unit
    rank_alignment=8,
    max_loras=CONFIG.max_loras,
    kv_tokens=CONFIG.num_kv_blocks * CONFIG.block_size,
    max_num_batched_tokens=CONFIG.max_num_batched_tokens,
    prefill_step_s=CONFIG.target_step_ms / 1000,
)
WHAT = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p99_s": "TTFT p99, s",
    "loads_per_request": "loads / request",
}


def of_real(runs: Sequence[tuple[FleetResult, Traffic]]) -> dict[str, float]:
    """Numbers of all requests of one trace, or of several."""
    first_s = np.concatenate([measured.first_token_s for measured, _ in runs])
    speeds = [float((t.prompt_tokens + t.output_tokens).sum()) / measured.end_s for measured, t in runs]
    return {
        "tokens_per_s": float(np.mean(speeds)),
        "ttft_p50_s": percentile(first_s, 50),
        "ttft_p99_s": percentile(first_s, 99),
        "loads_per_request": sum(measured.num_loads for measured, _ in runs) / len(first_s),
    }


def of_simulated(results: Sequence[Result]) -> dict[str, float]:
    """Numbers of all requests over runs of one trace that differ in when replicas report, or over several traces."""
    first_s = np.concatenate([result.first_token_s for result in results])
    return {
        "tokens_per_s": float(np.mean([result.summary()["tokens_per_s"] for result in results])),
        "ttft_p50_s": percentile(first_s, 50),
        "ttft_p99_s": percentile(first_s, 99),
        "loads_per_request": sum(result.num_loads for result in results) / len(first_s),
    }


def table(rows: Sequence[tuple[str, dict[str, float], dict[str, float]]]) -> str:
    """A line per row and quantity: real, simulated, error."""
    lines = ["| trace | what | real | simulated | error |", "|---:|---|---:|---:|---:|"]
    for label, real, simulated in rows:
        for key, name in WHAT.items():
            error = 100 * (simulated[key] / real[key] - 1) if real[key] else float("nan")
            lines.append(f"| {label} | {name} | {real[key]:.4g} | {simulated[key]:.4g} | {error:+.1f} % |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL_URI)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--traces", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each trace")
    parser.add_argument("--seeds", type=int, default=8, help="simulations of each trace, of which all requests count")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--out", type=Path, help="keep steps, times and errors here (JSON)")
    arguments = parser.parse_args(argv)
    if arguments.traces < 2:
        parser.error("at least two traces are needed: each is simulated with the times of the others")
    checkpoint = load_checkpoint(resolve_model(arguments.model))
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(checkpoint.spec, Path(folder))
    backends = [load_backend(checkpoint, CONFIG) for _ in range(arguments.replicas)]
    run_real(backends, adapters, trace(1000, arguments.rate, 5.0))  # compiles, and takes memory
    traces = [trace(seed, arguments.rate, arguments.seconds) for seed in range(1, arguments.traces + 1)]
    runs = [(run_real(backends, adapters, traffic, seed), traffic) for seed, traffic in enumerate(traces, 1)]
    before = replace(read_costs(), host_s=0.0, disk_s=0.0, source_s=0.0)  # adapters lie in host memory here
    rows, all_results = [], []
    for number, (measured, traffic) in enumerate(runs):
        costs = fit([step for other, _ in runs if other is not measured for step in other.steps], before)
        plan = Plan(arguments.replicas, costs, SIZE)
        results = [simulate(traffic, plan, seed) for seed in range(arguments.seeds)]
        all_results += results
        rows.append((str(number + 1), of_real([(measured, traffic)]), of_simulated(results)))
        if arguments.out is not None:
            record = {"costs": asdict(costs), "steps": measured.steps, "row": rows[-1],
                    "first": measured.first_token_s.tolist()}  # fmt: skip
            arguments.out.with_suffix(f".{number + 1}.json").write_text(json.dumps(record))
    print(f"{sum(len(measured.steps) for measured, _ in runs)} steps.\n")
    print(table([*rows, ("all", of_real(runs), of_simulated(all_results))]))


if __name__ == "__main__":
    main()
