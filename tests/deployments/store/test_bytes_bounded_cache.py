"""Eviction: the bound holds, pins hold, and each policy gives up what it says."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.store.bytes_bounded_cache import BytesBoundedCache
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
    storage = BytesBoundedCache(100, policy)
    sizes: dict[str, int] = {}
    refs: dict[str, int] = {}
    pinned: set[str] = set()
    for what, key, size, load_s in events:
        if what == "want" and key in storage:
            storage.record_hit(key)
        elif what == "want":
            before = set(storage)
            evicted = storage.add(key, size, load_s)
            if evicted is None:
                stays = pinned & set(sizes) | {name for name, count in refs.items() if count}
                assert sum(sizes[name] for name in stays) + size > 100
                assert set(storage) == before
            else:
                assert not any(refs.get(name) or name in pinned for name in evicted)
                assert len(set(evicted)) == len(evicted)
                for name in evicted:
                    del sizes[name]
                sizes[key] = size
        elif what == "pin":
            pinned = pinned | {key} if size % 2 else pinned - {key}
            storage.pin(pinned)
            assert storage.pinned_bytes == sum(sizes[name] for name in pinned & set(sizes))
        elif what == "remove":
            assert storage.remove(key) == (key in sizes)
            sizes.pop(key, None)
            refs.pop(key, None)
        elif what == "ref" and key in storage:
            storage.ref(key)
            refs[key] = refs.get(key, 0) + 1
        elif what == "unref" and refs.get(key):
            storage.unref(key)
            refs[key] -= 1
        assert set(storage) == set(sizes)
        assert len(storage) == len(sizes)
        assert storage.total_bytes == sum(sizes.values()) <= 100
        assert storage._fixed_bytes == sum(
            size for key, size in sizes.items() if refs.get(key) or key in storage._pinned
        )
        assert len(storage._queue) <= 4 * len(storage) + 65 + 8


@given(keys=st.lists(st.sampled_from("abcdefgh"), max_size=200))
@settings(max_examples=examples(60), deadline=None)
def test_lru_is_the_textbooks(keys: list[str]) -> None:
    storage, model = BytesBoundedCache(3, "lru"), OrderedDict[str, None]()
    for key in keys:
        if key in model:
            storage.record_hit(key)
        else:
            expected = [model.popitem(last=False)[0]] if len(model) == 3 else []
            assert storage.add(key, 1, 1.0) == expected
            model[key] = None
        model.move_to_end(key)


def test_lfu_keeps_what_is_used_often_but_not_for_ever() -> None:
    storage = BytesBoundedCache(3, "lfu")
    storage.add("often", 1, 1.0)
    for _ in range(20):
        storage.record_hit("often")
    for number in range(10):
        evicted = storage.add(f"once{number}", 1, 1.0)
        assert evicted is not None
        assert "often" not in evicted
    assert "often" in storage
    for number in range(100):
        storage.add(f"later{number}", 1, 1.0)
    assert "often" not in storage, "its popularity is long past"


def test_cost_keeps_what_is_dear_per_byte() -> None:
    storage = BytesBoundedCache(100, "cost")
    storage.add("small and slow", 10, 5.0)
    storage.add("big and fast", 80, 0.1)
    assert storage.add("new", 50, 1.0) == ["big and fast"]
    storage = BytesBoundedCache(100, "cost")
    storage.add("big and fast", 80, 0.1)
    for _ in range(1000):
        storage.record_hit("big and fast")
    storage.add("small and slow", 10, 1.0)
    assert storage.add("new", 50, 1.0) == ["small and slow", "big and fast"], (
        "wanted a thousand times, it is worth more"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_skewed_demand_is_served_better_than_by_chance(policy: EvictionPolicy) -> None:
    """1,000 things, Zipf(1), room for 100: LRU finds about half of the requests, chance a tenth."""
    rng = random.Random(any_seed())
    storage = BytesBoundedCache(100, policy)
    names = [str(index) for index in range(1000)]
    wanted = rng.choices(names, [1 / (index + 1) for index in range(1000)], k=6000)
    hits = 0
    for name in wanted:
        if name in storage:
            hits += 1
            storage.record_hit(name)
        else:
            storage.add(name, 1, 1.0)
    assert hits / len(wanted) > 0.35


def test_a_hundred_thousand_are_taken_in_without_looking_at_the_others() -> None:
    storage = BytesBoundedCache(10**9, "lru")
    pinned = [f"k{index}" for index in range(0, 5_000, 7)]
    storage.pin(pinned)

    class Watched(dict[str, object]):
        num_walks = 0

        def __iter__(self) -> Iterator[str]:
            Watched.num_walks += 1
            return super().__iter__()

        items = values = __iter__  # type: ignore[assignment]

    storage._entries = Watched()  # type: ignore[assignment]
    for index in range(60):
        assert storage.add(f"k{index}", 1, 1.0) == []
    assert Watched.num_walks == 0
    assert storage.pinned_bytes == 9


def test_other_limits_keep_what_was_used_last_and_what_is_fixed() -> None:
    storage = BytesBoundedCache(100, "cost")
    for name in "abcde":
        storage.add(name, 20, 1.0)
    storage.pin(["a"])
    storage.ref("b")
    storage.record_hit("c")
    assert storage.set_limit(70, "lru") == ["d", "e"]
    assert (set(storage), storage.total_bytes) == ({"a", "b", "c"}, 60)
    assert storage.set_limit(30, "lru") == ["c"], "pinned and read ones stay, beyond the limit too"
    assert storage.add("f", 10, 1.0) is None
    storage.unref("b")
    assert storage.add("f", 10, 1.0) == ["b"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_one_tenant_s_leaves_what_others_use_within_their_share(policy: EvictionPolicy) -> None:
    storage = BytesBoundedCache(100, policy)
    assert storage.add("the one", 10, 0.1, "one") == []
    for index in range(200):
        evicted = storage.add(f"{index}", 10, 0.1, "many")
        assert evicted is not None
        assert "the one" not in evicted
    assert storage.total_bytes == 100
    assert storage.add("large", 95, 0.1, "many") is not None
    assert "the one" not in storage, "there was nothing else that could make the room"
    for index in range(5):
        storage.remove("large")
        assert storage.add(f"one {index}", 20, 0.1, "one") == []
    evicted = storage.add("another's", 20, 0.1, "two")
    assert evicted == ["one 0"], "who has more than its share makes room"
