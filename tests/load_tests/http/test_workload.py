"""A plan is a function of its seed, and each part of it of its own share of the seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.simulation.trace import TraceEntry
from load_tests.http.lengths import lengths
from load_tests.http.workload import WorkloadConfig, plan

CONFIG = WorkloadConfig(seed=3, num_requests=300, prompt_lengths="uniform:5:20", output_lengths="lognormal:30:0.5:90")
MODELS = ["a", "b", "c", "d"]


def test_equal_seeds_make_equal_plans() -> None:
    assert plan(CONFIG, MODELS) == plan(CONFIG, MODELS)
    assert plan(CONFIG, MODELS) != plan(replace(CONFIG, seed=4), MODELS)


def test_arrivals_do_not_disturb_the_rest() -> None:
    bursty = plan(replace(CONFIG, arrivals="gamma:3", rate=9.0), MODELS)
    for before, after in zip(plan(CONFIG, MODELS), bursty, strict=True):
        assert replace(before, arrival_s=0) == replace(after, arrival_s=0)


def test_a_models_prefix_does_not_depend_on_who_comes_first() -> None:
    config = replace(CONFIG, shared_prefix_words=8, prompt_lengths="fixed:12")
    plans = [plan(replace(config, popularity=kind), MODELS) for kind in ("uniform", "skewed:9")]
    first, second = ({r.model: r.prompt.split()[:8] for r in requests} for requests in plans)
    assert [r.model for r in plans[0]][:4] != [r.model for r in plans[1]][:4]
    assert all(first[model] == prefix for model, prefix in second.items())


def test_popularity_does_not_move_the_base() -> None:
    config = replace(CONFIG, base_share=0.4)
    plans = [
        plan(replace(config, popularity=kind), MODELS, "base") for kind in ("uniform", "powerlaw:0.5", "hotset:2:1:9")
    ]
    bases = [[r.model == "base" for r in requests] for requests in plans]
    assert bases[0] == bases[1] == bases[2]


def test_lengths_are_kept() -> None:
    requests = plan(CONFIG, MODELS)
    assert {len(r.prompt.split()) for r in requests} == set(range(5, 21))
    assert max(r.max_tokens for r in requests) <= 90


def test_lognormal_median_and_spread() -> None:
    drawn = np.log(lengths("lognormal:200:0.7", 20_000, np.random.default_rng(1)))
    assert np.exp(np.median(drawn)) == pytest.approx(200, rel=0.03)
    assert drawn.std() == pytest.approx(0.7, rel=0.03)


@pytest.mark.parametrize(
    "spec",
    [
        "fixed",
        "fixed:0",
        "uniform:5:4",
        "uniform:0:4",
        "lognormal:9",
        "normal:1:1",
        "fixed:1.5",
        "uniform:1:2.5",
        "lognormal:9:1:0",
        "lognormal:9:1:5:5",
        "lognormal:64:1:2.5",
    ],
)
def test_unknown_lengths_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="not one of"):
        lengths(spec, 3, np.random.default_rng(0))


def test_a_length_out_of_all_proportion_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bound it: lognormal:500:6:MAX"):
        lengths("lognormal:500:6", 1000, np.random.default_rng(0))
    assert lengths("lognormal:500:6:4000", 1000, np.random.default_rng(0)).max() == 4000
    with pytest.raises(ValueError, match=r"up to inf; bound it"):
        lengths("lognormal:64:1000", 1000, np.random.default_rng(0))


@pytest.mark.parametrize("spec", ["fixed:1e12", "fixed:1000001", "uniform:1:1e30", "lognormal:64:1:1e12"])
def test_a_bound_out_of_all_proportion_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="is above 1000000"):
        lengths(spec, 3, np.random.default_rng(0))


def test_prefixes_are_shared_within_a_model_only() -> None:
    requests = plan(replace(CONFIG, shared_prefix_words=8, prompt_lengths="fixed:12"), MODELS)
    prefixes = {(r.model, " ".join(r.prompt.split()[:8])) for r in requests}
    assert len(prefixes) == len({text for _, text in prefixes}) == len({r.model for r in requests}) == 4
    assert len({r.prompt for r in requests}) > 290
    assert all(len(r.prompt.split()) == 12 for r in requests)


def test_the_base_gets_its_share() -> None:
    config = replace(CONFIG, num_requests=5000, base_share=0.25)
    models = Counter(r.model for r in plan(config, MODELS, "base"))
    assert models["base"] / 5000 == pytest.approx(0.25, abs=0.02)


def test_the_last_tenant_is_the_adversary() -> None:
    config = replace(CONFIG, num_requests=6000, num_tenants=3, adversary_factor=10)
    tenants = Counter(r.tenant for r in plan(config, MODELS))
    assert tenants["tenant-2"] / 6000 == pytest.approx(10 / 12, abs=0.02)
    assert tenants["tenant-0"] / 6000 == pytest.approx(1 / 12, abs=0.02)


def test_a_trace_wins_over_what_is_drawn() -> None:
    trace = [TraceEntry(0.5, "x", 7, 9, "them"), TraceEntry(1.5)]
    first, second = plan(CONFIG, MODELS, trace=trace)
    assert (first.arrival_s, first.model, first.max_tokens, first.tenant) == (0.5, "x", 9, "them")
    assert len(first.prompt.split()) == 7
    assert (second.arrival_s, second.tenant) == (1.5, "tenant-0")
    assert second.model in MODELS


@pytest.mark.parametrize(
    "changes",
    [
        {"base_share": 0.5},
        {"base_share": 2.0},
        {"num_tenants": 0},
        {"adversary_factor": 2.0},
        {"num_tenants": 2, "adversary_factor": float("nan")},
        {"num_requests": 0},
        {"shared_prefix_words": -1},
        {"shared_prefix_words": 10**12},
        {"seed": -1},
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(reversed(changes))):
        plan(replace(CONFIG, **changes), MODELS)
