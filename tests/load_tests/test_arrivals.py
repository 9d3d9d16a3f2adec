"""Arrival processes have the rate and the burstiness they are asked for; traces are read strictly."""

from __future__ import annotations

import json

import numpy as np
import pytest

from app.simulation.trace import read_trace
from load_tests.arrivals import arrival_times

COUNT = 40_000


def gaps_cv(times: np.ndarray) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize("spec", ["constant", "poisson", "gamma:0.5", "gamma:2", "onoff:2:3"])
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_the_mean_rate_is_kept(spec: str, rate: float) -> None:
    times = arrival_times(spec, rate, COUNT, np.random.default_rng(1))
    assert times.shape == (COUNT,)
    assert (np.diff(times) >= 0).all()
    assert COUNT / times[-1] == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(("spec", "cv"), [("constant", 0.0), ("poisson", 1.0), ("gamma:0.5", 0.5), ("gamma:3", 3.0)])
def test_gaps_vary_as_asked(spec: str, cv: float) -> None:
    times = arrival_times(spec, 10, COUNT, np.random.default_rng(2))
    assert gaps_cv(times) == pytest.approx(cv, rel=0.05, abs=1e-6)


def test_gamma_one_is_poisson() -> None:
    """Exponential gaps: the share longer than the mean is 1/e."""
    gaps = np.diff(arrival_times("gamma:1", 1, COUNT, np.random.default_rng(3)))
    assert (gaps > 1).mean() == pytest.approx(np.exp(-1), rel=0.03)


def test_nothing_arrives_while_off() -> None:
    times = arrival_times("onoff:2:3", 10, COUNT, np.random.default_rng(4))
    assert ((times % 5) <= 2 + 1e-9).all()
    assert times.max() > 100


def test_the_seed_decides() -> None:
    first, again, other = (arrival_times("poisson", 1, 50, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize("spec", ["", "poison", "gamma", "gamma:0", "gamma:x", "poisson:3", "onoff:0:1", "onoff:1"])
def test_unknown_processes_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"not one of|is not a number"):
        arrival_times(spec, 1, 3, np.random.default_rng(0))


@pytest.mark.parametrize("spec", ["gamma:1e-160", "gamma:0.0009", "gamma:1001"])
def test_a_burstiness_out_of_all_proportion_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"must be from 0\.001 to 1000"):
        arrival_times(spec, 1, 3, np.random.default_rng(0))


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_of_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        arrival_times("poisson", rate, 3, np.random.default_rng(0))


def test_traces() -> None:
    entries = read_trace([json.dumps({"arrival_s": 0.5, "model": "sql"}), "", json.dumps({"arrival_s": 2})])
    assert [(e.arrival_s, e.model, e.tenant) for e in entries] == [(0.5, "sql", None), (2, None, None)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"model": "sql"}',
        '{"arrival_s": 1, "colour": "red"}',
        '{"arrival_s": 0.1}',
        '{"arrival_s": -1}',
        '{"arrival_s": "1"}',
        '{"arrival_s": NaN}',
        '{"arrival_s": 1, "model": 3}',
        '{"arrival_s": 1, "tenant": ""}',
        '{"arrival_s": 1, "prompt_tokens": 0}',
        '{"arrival_s": 1, "output_tokens": 2.5}',
        '{"arrival_s": 1, "output_tokens": 1000001}',
        '{"arrival_s": 1, "prompt_tokens": 1000000000000}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_bad_trace_lines_are_named(line: str) -> None:
    with pytest.raises(ValueError, match="trace, line 2"):
        read_trace(['{"arrival_s": 0.2}', line])


def test_a_trace_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"day\.jsonl has no requests"):
        read_trace(["", " "], "day.jsonl")
