"""Eviction: the bound holds, pins hold, and each policy gives up what it says."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.store.bounded_set import BoundedSet
from app.engine.pools.eviction import EvictionPolicy
from tests.budgets import examples
from tests.seeds import any_seed

POLICIES: tuple[EvictionPolicy, ...] = ("lru", "lfu", "cost")

events = st.lists(
    st.tuples(
        st.sampled_from(["want", "want", "want", "remove", "ref", "unref", "pin"]),
        st.sampled_from("abcdefgh"),
        st.integers(0, 60),
        st.floats(0, 10),
    ),
    max_size=120,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(events=events)
@settings(max_examples=examples(60), deadline=None)
def test_every_byte_and_ref_is_accounted_for(policy: EvictionPolicy, events: list[tuple[str, str, int, float]]) -> None:
    kept = BoundedSet(100, policy)
    sizes: dict[str, int] = {}
    refs: dict[str, int] = {}
    pinned: set[str] = set()
    for what, key, size, load_s in events:
        if what == "want" and key in kept:
            kept.use(key)
        elif what == "want":
            before = set(kept)
            evicted = kept.add(key, size, load_s)
            if evicted is None:
                stays = pinned & set(sizes) | {name for name, count in refs.items() if count}
                assert sum(sizes[name] for name in stays) + size > 100
                assert set(kept) == before
            else:
                assert not any(refs.get(name) or name in pinned for name in evicted)
                assert len(set(evicted)) == len(evicted)
                for name in evicted:
                    del sizes[name]
                sizes[key] = size
        elif what == "pin":
            pinned = pinned | {key} if size % 2 else pinned - {key}
            kept.pin(pinned)
            assert kept.pinned_bytes == sum(sizes[name] for name in pinned & set(sizes))
        elif what == "remove":
            assert kept.remove(key) == (key in sizes)
            sizes.pop(key, None)
            refs.pop(key, None)
        elif what == "ref" and key in kept:
            kept.ref(key)
            refs[key] = refs.get(key, 0) + 1
        elif what == "unref" and refs.get(key):
            kept.unref(key)
            refs[key] -= 1
        assert set(kept) == set(sizes)
        assert len(kept) == len(sizes)
        assert kept.total_bytes == sum(sizes.values()) <= 100
        assert kept._fixed_bytes == sum(size for key, size in sizes.items() if refs.get(key) or key in kept._pinned)
        assert len(kept._queue) <= 4 * len(kept) + 65 + 8


@given(keys=st.lists(st.sampled_from("abcdefgh"), max_size=200))
@settings(max_examples=examples(60), deadline=None)
def test_lru_is_the_textbooks(keys: list[str]) -> None:
    kept, model = BoundedSet(3, "lru"), OrderedDict[str, None]()
    for key in keys:
        if key in model:
            kept.use(key)
        else:
            expected = [model.popitem(last=False)[0]] if len(model) == 3 else []
            assert kept.add(key, 1, 1.0) == expected
            model[key] = None
        model.move_to_end(key)


def test_lfu_keeps_what_is_used_often_but_not_for_ever() -> None:
    kept = BoundedSet(3, "lfu")
    kept.add("often", 1, 1.0)
    for _ in range(20):
        kept.use("often")
    for number in range(10):
        evicted = kept.add(f"once{number}", 1, 1.0)
        assert evicted is not None
        assert "often" not in evicted
    assert "often" in kept
    for number in range(100):
        kept.add(f"later{number}", 1, 1.0)
    assert "often" not in kept, "its popularity is long past"


def test_cost_keeps_what_is_dear_per_byte() -> None:
    kept = BoundedSet(100, "cost")
    kept.add("small and slow", 10, 5.0)
    kept.add("big and fast", 80, 0.1)
    assert kept.add("new", 50, 1.0) == ["big and fast"]
    kept = BoundedSet(100, "cost")
    kept.add("big and fast", 80, 0.1)
    for _ in range(1000):
        kept.use("big and fast")
    kept.add("small and slow", 10, 1.0)
    assert kept.add("new", 50, 1.0) == ["small and slow", "big and fast"], "wanted a thousand times, it is worth more"


@pytest.mark.parametrize("policy", POLICIES)
def test_skewed_demand_is_served_better_than_by_chance(policy: EvictionPolicy) -> None:
    """1,000 things, Zipf(1), room for 100: LRU finds about half of the requests, chance a tenth."""
    rng = random.Random(any_seed())
    kept = BoundedSet(100, policy)
    names = [str(index) for index in range(1000)]
    wanted = rng.choices(names, [1 / (index + 1) for index in range(1000)], k=6000)
    hits = 0
    for name in wanted:
        if name in kept:
            hits += 1
            kept.use(name)
        else:
            kept.add(name, 1, 1.0)
    assert hits / len(wanted) > 0.35


def test_a_hundred_thousand_are_taken_in_without_looking_at_the_others() -> None:
    kept = BoundedSet(10**9, "lru")
    pinned = [f"k{index}" for index in range(0, 5_000, 7)]
    kept.pin(pinned)

    class Watched(dict[str, object]):
        num_walks = 0

        def __iter__(self) -> Iterator[str]:
            Watched.num_walks += 1
            return super().__iter__()

        items = values = __iter__  # type: ignore[assignment]

    kept._kept = Watched()  # type: ignore[assignment]
    for index in range(60):
        assert kept.add(f"k{index}", 1, 1.0) == []
    assert Watched.num_walks == 0
    assert kept.pinned_bytes == 9


def test_other_limits_keep_what_was_used_last_and_what_is_fixed() -> None:
    kept = BoundedSet(100, "cost")
    for name in "abcde":
        kept.add(name, 20, 1.0)
    kept.pin(["a"])
    kept.ref("b")
    kept.use("c")
    assert kept.limit(70, "lru") == ["d", "e"]
    assert (set(kept), kept.total_bytes) == ({"a", "b", "c"}, 60)
    assert kept.limit(30, "lru") == ["c"], "pinned and read ones stay, beyond the limit too"
    assert kept.add("f", 10, 1.0) is None
    kept.unref("b")
    assert kept.add("f", 10, 1.0) == ["b"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_one_tenant_s_leaves_what_others_use_within_their_share(policy: EvictionPolicy) -> None:
    kept = BoundedSet(100, policy)
    assert kept.add("the one", 10, 0.1, "one") == []
    for index in range(200):
        evicted = kept.add(f"{index}", 10, 0.1, "many")
        assert evicted is not None
        assert "the one" not in evicted
    assert kept.total_bytes == 100
    assert kept.add("large", 95, 0.1, "many") is not None
    assert "the one" not in kept, "there was nothing else that could make the room"
    for index in range(5):
        kept.remove("large")
        assert kept.add(f"one {index}", 20, 0.1, "one") == []
    evicted = kept.add("another's", 20, 0.1, "two")
    assert evicted == ["one 0"], "who has more than its share makes room"
