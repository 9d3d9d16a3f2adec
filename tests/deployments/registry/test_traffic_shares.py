"""The shares that placement is told follow the registry's weights, within a tenth."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.deployments.registry.models import AliasEntry, AliasTarget, CatalogEntry
from app.deployments.registry.traffic_shares import MIN_SHARE, TrafficShares
from tests.deployments.registry.steered import KEYS, entries, entry


@given(changes=st.lists(st.tuples(st.sampled_from(KEYS), entries), max_size=30))
def test_following_changes_is_starting_anew(
    changes: list[tuple[tuple[str, str], tuple[str, float, bool] | None]],
) -> None:
    book = TrafficShares()
    now: dict[tuple[str, str], CatalogEntry] = {}
    for key, values in changes:
        now.pop(key, None)
        new = None
        if values is not None:
            digest, weight, pinned = values
            new = now[key] = entry(key, digest, weight, pinned=pinned)
        before = dict(book.value)
        changes = book.apply(key, new)
        assert changes == {
            digest: book.value.get(digest)
            for digest in before.keys() | book.value.keys()
            if before.get(digest) != book.value.get(digest)
        }
        fresh = TrafficShares(now.values()).value
        assert set(book.value) == set(fresh)
        for digest, share in fresh.items():
            assert share / 1.1001 <= book.value[digest] <= share * 1.1001


def test_a_share_is_the_weight_over_the_sum_and_grows_stale_by_a_tenth_at_most() -> None:
    book = TrafficShares([entry(("default", f"n{index}"), f"d{index}") for index in range(96)])
    alias = AliasEntry("alias", (AliasTarget("n1", 1.0),), 1, 0.0, tenant_id="default")
    assert book.apply(("default", "alias"), alias) == {}
    assert book.apply(("default", "heavy"), entry(("default", "heavy"), "heavy", 4.0)) == {"heavy": 4 / 96}
    told = [book.apply(("default", f"m{index}"), entry(("default", f"m{index}"), "m")) for index in range(7)]
    assert told == [{}] * 5 + [{"heavy": 4 / 106}, {}]
    assert book.value == {"heavy": 4 / 106}
    assert book.apply(("default", "heavy"), None) == {"heavy": None}


def test_a_hundred_thousand_adapters_with_weights_are_no_shares_and_cost_nothing() -> None:
    book = TrafficShares([entry(("default", f"n{index}"), f"d{index}", 2.0) for index in range(100_000)])
    assert book.value == {}
    began_s = time.process_time()
    for index in range(1000):
        assert book.apply(("default", f"m{index}"), entry(("default", f"m{index}"), f"e{index}", 2.0)) == {}
    assert (time.process_time() - began_s) / 1000 < 0.005, "a fraction of a millisecond, not of a second"
    heavy = book.apply(("default", "heavy"), entry(("default", "heavy"), "heavy", 1e4))
    assert heavy == {"heavy": pytest.approx(0.05, rel=0.1)}
    assert len(book.apply(("default", "heavier"), entry(("default", "heavier"), "heavier", 1e6))) == 2
    assert len(book.value) <= 1 / MIN_SHARE
