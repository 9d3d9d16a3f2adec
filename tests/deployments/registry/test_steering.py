"""Pins and weights: what the registry says is what tiers, replicas and placement hear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import load_config
from app.deployments.registry.entries import AliasEntry, AliasTarget, CatalogEntry
from app.deployments.registry.steering import PinLimits, Steerer, Steering
from app.engine.adapters.card import AdapterRef
from app.engine.errors import AdapterTooLarge

KEYS = [("default", "a"), ("default", "b"), ("other", "a"), ("other", "c")]


def entry(key: tuple[str, str], digest: str, weight: float = 1.0, *, pinned: bool = False) -> CatalogEntry:
    ref = AdapterRef(key[1], digest, key[0])
    return CatalogEntry(ref, 8, 64, 0.0, pinned=pinned, traffic_weight=weight)


entries = st.one_of(
    st.none(),
    st.builds(
        lambda digest, weight, pinned: (digest, weight, pinned),
        st.sampled_from(["d1", "d2", "d3"]),
        st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 8.0]),
        st.booleans(),
    ),
)


@given(changes=st.lists(st.tuples(st.sampled_from(KEYS), entries), max_size=30))
def test_following_changes_is_starting_anew(
    changes: list[tuple[tuple[str, str], tuple[str, float, bool] | None]],
) -> None:
    steerer = Steerer()
    now: dict[tuple[str, str], CatalogEntry] = {}
    for key, values in changes:
        now.pop(key, None)
        new = None
        if values is not None:
            digest, weight, pinned = values
            new = now[key] = entry(key, digest, weight, pinned=pinned)
        before = steerer.value
        assert steerer.apply(key, new) == (steerer.value != before)
        fresh = Steerer(now.values()).value
        assert steerer.value.pinned == fresh.pinned
        assert steerer.value.pinned_digests == {item.ref.digest for item in now.values() if item.pinned}
        assert set(steerer.value.shares) == set(fresh.shares)
        for digest, share in fresh.shares.items():
            assert share / 1.1 <= steerer.value.shares[digest] <= share * 1.1
        weights = [item.traffic_weight for item in steerer.value.pinned]
        assert weights == sorted(weights, reverse=True)


def test_a_share_is_the_weight_over_the_sum_and_grows_stale_by_a_tenth_at_most() -> None:
    steerer = Steerer([entry(("default", f"n{index}"), f"d{index}") for index in range(96)])
    alias = AliasEntry("alias", (AliasTarget("n1", 1.0),), 1, 0.0)
    assert not steerer.apply(("default", "alias"), alias)
    assert steerer.apply(("default", "heavy"), entry(("default", "heavy"), "heavy", 4.0))
    assert steerer.value == Steering((), {"heavy": 0.04})
    told = [steerer.apply(("default", f"m{index}"), entry(("default", f"m{index}"), "m")) for index in range(11)]
    assert told == [False] * 10 + [True]
    assert steerer.value.shares == {"heavy": 4 / 111}


def test_limits_are_a_part_of_what_the_service_has() -> None:
    settings = {"engine": {"adapter_rank_rows": 100, "max_adapter_slots": 9}, "adapters": {"pinned_share": 0.25}}
    limits = PinLimits.of(load_config(settings, environ={}))
    assert (limits.rank_rows, limits.adapter_slots) == (25, 2)
    assert limits.host_bytes == 128 << 20
    assert limits.extra_bytes == 64 << 20
    assert limits.rank_alignment == 8


def test_pins_are_counted_in_the_rows_of_the_device() -> None:
    """Eight adapters of rank 8 take 64 rows of a CPU engine and 128 of a GPU's."""
    pinned = [entry(("default", f"n{index}"), f"d{index}", pinned=True) for index in range(8)]
    for device, is_enough in (("cpu", True), ("cuda", False), ("cuda:1", False)):
        settings = {"engine": {"adapter_rank_rows": 127, "device": device}, "adapters": {"pinned_share": 1.0}}
        limits = PinLimits.of(load_config(settings, environ={}))
        if is_enough:
            limits.check("n7", pinned)
        else:
            with pytest.raises(AdapterTooLarge, match="8 pinned adapters would take 128 rank rows and may take 127"):
                limits.check("n7", pinned)
