"""Measures the simulation's costs: steps, prompts and adapter writes of the real engine on this machine.

Writes a table of costs (JSON) for `app.simulation.costs`, which includes its source. One replica with the service's
control plane runs a trace (`load_tests.simulate.real_fleet`), and `fit` draws the line through all of its steps: by
non-negative least squares of errors relative to the line, the last times without the steps that lie far off. (Relative
to the steps themselves the line would lie below their mean, and queues would be too short.) The times of loading to the
host and of starting a replica are taken from the existing table: `bench_adapters` and `bench_start` measure them. Times
are CPU seconds of one thread.

    python -m load_tests.simulate.measure --out app/simulation/costs.json
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.simulation.costs import Costs, read_costs, write_costs
from app.version import version
from load_tests.simulate.real_fleet import CONFIG, Step, make_adapters, run_real, trace
from load_tests.stats import environment

#: Steps farther from the line than this many times the median distance are left out of the next fit.
FAR = 6.0
#: Each fit weighs errors by the line of the previous fit.
NUM_FITS = 10


def fit(steps: Sequence[Step], before: Costs) -> Costs:
    """The line through these steps; other costs are those of `before`. ValueError for fewer steps than unknowns."""
    counted = np.array([(1, *step[:-1]) for step in steps], np.float64)
    seconds = np.array([step.seconds for step in steps])
    if len(steps) < 2 * counted.shape[1]:
        raise ValueError(f"{len(steps)} steps are too few to fit {counted.shape[1]} times to; measure for longer")
    line_s = np.full(len(steps), float(np.median(seconds)))
    near = np.ones(len(steps), bool)
    for _ in range(NUM_FITS):
        found, _ = nnls((counted / line_s[:, None])[near], (seconds / line_s)[near])
        line_s = np.maximum(counted @ found, 1e-6)
        away = np.abs(seconds / line_s - 1)
        near = away <= FAR * max(float(np.median(away)), 1e-9)
    step_s, sequence_s, row_s, prompt_token_s, look_s, row_write_s = map(float, found)
    return replace(
        before, step_s=step_s, sequence_s=sequence_s, row_s=row_s, prompt_token_s=prompt_token_s, look_s=look_s,
        row_write_s=row_write_s,
    )  # fmt: skip


def measure(model: str, seconds: float, rate: float) -> Costs:
    """Run a trace on one replica, and fit its steps."""
    checkpoint = load_checkpoint(resolve_model(model))
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(checkpoint.spec, Path(folder))
    backends = [load_backend(checkpoint, CONFIG)]
    run_real(backends, adapters, trace(1000, rate, 5.0))  # compiles, and takes memory
    measured = run_real(backends, adapters, trace(0, rate, seconds))
    here = environment()
    first = adapters[0].card
    return replace(
        fit(measured.steps, read_costs()),
        row_bytes=first.size_bytes / first.max_rank,
        machine=f"one thread of {here['cpu']}, {checkpoint.spec.name}",
        source=f"python -m load_tests.simulate.measure --seconds {seconds:g} --rate {rate:g}, polylora {version()}, "
        f"{len(measured.steps)} steps",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL_URI)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    costs = measure(arguments.model, arguments.seconds, arguments.rate)
    write_costs(costs, arguments.out)
    print(costs)


if __name__ == "__main__":
    main()
