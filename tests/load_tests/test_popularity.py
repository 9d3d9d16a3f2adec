"""Popularity distributions give adapters the shares their names promise."""

from __future__ import annotations

import numpy as np
import pytest

from load_tests.popularity import adapter_indices

COUNT = 50_000


def shares(spec: str, num_adapters: int, count: int = COUNT, seed: int = 7) -> np.ndarray:
    indices = adapter_indices(spec, num_adapters, np.zeros(count), np.random.default_rng(seed))
    assert indices.shape == (count,)
    return np.bincount(indices, minlength=num_adapters) / count


def test_uniform() -> None:
    assert shares("uniform", 20) == pytest.approx(np.full(20, 0.05), abs=0.005)


@pytest.mark.parametrize("s", [0.0, 1.0, 1.6])
def test_zipf(s: float) -> None:
    weights = np.arange(1, 31) ** -s
    assert shares(f"zipf:{s}", 30) == pytest.approx(weights / weights.sum(), abs=0.006)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_powerlaw_has_the_distribution_function_of_a_power(alpha: float) -> None:
    """P(index < k) = (k / N)^alpha."""
    cumulative = np.cumsum(shares(f"powerlaw:{alpha}", 100))
    assert cumulative == pytest.approx((np.arange(1, 101) / 100) ** alpha, abs=0.01)


def test_the_hot_set_rotates() -> None:
    arrival_s = np.linspace(0, 30, 30_000, endpoint=False)
    indices = adapter_indices("hotset:3:0.9:10", 30, arrival_s, np.random.default_rng(8))
    for period in range(3):
        now = indices[(arrival_s >= 10 * period) & (arrival_s < 10 * period + 10)]
        hot = (now >= 3 * period) & (now < 3 * period + 3)
        assert hot.mean() == pytest.approx(0.9, abs=0.006)
        assert set(now.tolist()) == set(range(30)), "the rest goes to all the others"


def test_a_hot_set_of_all_takes_every_request() -> None:
    assert shares("hotset:5:0.2:1", 5) == pytest.approx(np.full(5, 0.2), abs=0.01)
    with pytest.raises(ValueError, match="a hot set of 9 adapters, but there are 8"):
        shares("hotset:9:0.5:1", 8)


def test_a_hot_set_wraps_around() -> None:
    indices = adapter_indices("hotset:4:1:1", 6, np.full(1000, 1.5), np.random.default_rng(9))
    assert set(indices.tolist()) == {4, 5, 0, 1}


def test_punicas_four_classes() -> None:
    count = 400
    distinct, identical, even, skewed = (
        adapter_indices(spec, 1000, np.zeros(count), np.random.default_rng(10))
        for spec in ("distinct", "identical", "punica-uniform", "skewed")
    )
    assert sorted(distinct.tolist()) == list(range(count))
    assert set(identical.tolist()) == {0}
    assert set(even.tolist()) == set(range(20))
    assert 5 < len(set(skewed.tolist())) < 30


def test_skewed_is_geometric() -> None:
    found = shares("skewed", 50)[:5]
    assert found[:-1] / found[1:] == pytest.approx(np.full(4, 1.5), rel=0.06)


def test_skewed_reaches_every_adapter() -> None:
    """With a ratio near 1 the tail is long: 300 adapters of 1.001 each have nearly the same share."""
    weights = 1.001 ** -np.arange(300)
    assert shares("skewed:1.001", 300) == pytest.approx(weights / weights.sum(), abs=0.002)


@pytest.mark.parametrize(
    "spec", ["zipf", "zipf:-1", "powerlaw:0", "hotset:0:0.5:1", "hotset:1:2:1", "hotset:1.5:0.5:1", "skewed:1", "x"]
)
def test_unknown_popularity_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"not one of|above 1"):
        adapter_indices(spec, 8, np.zeros(3), np.random.default_rng(0))


def test_distinct_and_punica_uniform_need_enough_adapters() -> None:
    with pytest.raises(ValueError, match="4 requests, 3 adapters"):
        adapter_indices("distinct", 3, np.zeros(4), np.random.default_rng(0))
    with pytest.raises(ValueError, match="4 adapters, the root of 10 requests, not 3"):
        adapter_indices("punica-uniform", 3, np.zeros(10), np.random.default_rng(0))
