"""What is seen of adapters: sums that add up, of the right tenant, of bounded size, named by few labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.store.metrics import TierMetrics
from app.deployments.tenancy import metrics as exported
from app.deployments.tenancy.usage.adapter_stats import (
    OTHERS,
    SHORTEST_S,
    Activity,
    ActivityKey,
    ActivityStats,
    Adapter,
    AdapterStatsTable,
    first_token,
)
from app.deployments.tenancy.usage.tenant_throughput import MAX_NAMED, WINDOW_S
from app.engine.adapters.card import AdapterRef
from tests.budgets import examples

SQL = AdapterRef("sql", "d" * 64, "ada")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def of(name: str, digest: str = "d" * 64, *, tenant: str = "ada", owner: str = "ada") -> ActivityKey:
    return ActivityKey(tenant, owner, name, digest)


@settings(max_examples=examples(60), deadline=None)
@given(times_s=st.lists(st.floats(SHORTEST_S, 3000.0), min_size=1, max_size=50), part=st.floats(0.01, 1.0))
def test_a_quantile_of_sums_is_within_a_fifth(times_s: list[float], part: float) -> None:
    total = Activity()
    for time_s in times_s:
        total = total.plus(first_token(time_s))
    true_s = sorted(times_s)[-int(-part * len(times_s) // 1) - 1]
    assert total.num_first_tokens == len(times_s)
    assert total.first_token_s == pytest.approx(sum(times_s))
    assert total.first_token_quantile_s(part) == pytest.approx(true_s, rel=0.2)
    with pytest.raises(ValueError, match="first token"):
        Activity(num_requests=1).first_token_quantile_s(0.5)


def test_times_beyond_all_bounds_are_counted() -> None:
    total = first_token(-0.5).plus(first_token(0.0)).plus(first_token(1e6))
    assert total.num_first_tokens == 3
    assert total.first_token_quantile_s(0.5) < SHORTEST_S
    assert total.first_token_quantile_s(1.0) > 3000


def test_a_tenant_s_view_has_its_own_requests_for_its_own_name() -> None:
    clock = Clock()
    book = AdapterStatsTable(clock, monotonic=clock)
    clock.now_s += 7
    book.add([
        (of("sql"), Activity(2, 1, 10, 4, 6)),
        (of("sql", tenant="bob"), Activity(5)),  # it is shared with bob
        (of("copy", tenant="bob", owner="bob"), Activity(9)),  # the same contents by another name
        (of("sql", "e" * 64), Activity(30)),  # what the name meant before
    ])  # fmt: skip
    book.add([(of("sql"), Activity(1))])
    book.record_load("device", SQL.digest, 3)
    loads = {"device": 3}
    assert book.stats(SQL, tenant_id="ada") == ActivityStats(100.0, Activity(3, 1, 10, 4, 6), loads)
    assert book.stats(SQL, tenant_id="bob") == ActivityStats(100.0, Activity(5), loads)
    assert book.stats(SQL, tenant_id=None) == ActivityStats(100.0, Activity(8, 1, 10, 4, 6), loads)
    assert book.stats(AdapterRef("sql", "f" * 64, "ada"), tenant_id=None) == ActivityStats(100.0, Activity(), {})


@settings(max_examples=examples(40), deadline=None)
@given(asked=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=60))
def test_what_is_kept_is_bounded_and_says_since_when_it_is_whole(asked: list[tuple[int, int]]) -> None:
    clock, happened = Clock(), [(0.0, -1)]
    book = AdapterStatsTable(clock, max_entries=8)
    for digest, tenant in asked:
        clock.now_s += 1
        book.add([(of("n", f"d{digest}", tenant=f"t{tenant}"), Activity(1))])
        happened.append((clock.now_s, digest))
        storage = sum(1 + len(each.activities) for each in book._contents.values())
        assert storage == book._num_entries <= 8
    for digest in range(10):
        seen = book.stats(AdapterRef("n", f"d{digest}", "ada"), tenant_id=None)
        assert seen.activity.num_requests == sum(at_s > seen.since_s for at_s, each in happened if each == digest)


@settings(max_examples=examples(40), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 1000), max_size=100),
    loads=st.lists(st.tuples(st.integers(0, 120), st.sampled_from(["device", "disk"])), max_size=30),
)
def test_named_and_other_adapters_are_all_of_them(tokens: list[int], loads: list[tuple[int, str]]) -> None:
    book = AdapterStatsTable(Clock())
    for index, number in enumerate(tokens):
        book.add([(of(f"a{index}", f"d{index // 2}"), Activity(1, completion_tokens=number))])
    for index, tier in loads:
        book.record_load(tier, f"d{index}")
    busiest = book.busiest()
    assert len(busiest) <= MAX_NAMED + 1
    assert sum(busy.activity.num_requests for busy in busiest) == len(tokens)
    assert sum(busy.activity.completion_tokens for busy in busiest) == sum(tokens)
    told = sum((Counter(busy.num_loads) for busy in busiest), Counter[str]())
    assert told == Counter(tier for _, tier in loads), "contents with two names are told once"
    named = [busy.activity.completion_tokens for busy in busiest if busy.adapter != OTHERS]
    left = sorted(tokens, reverse=True)[MAX_NAMED:]
    assert not left or min(named) >= left[0]


def test_what_was_busy_long_ago_is_named_no_more_and_is_known_still() -> None:
    clock = Clock()
    book = AdapterStatsTable(clock, monotonic=clock)
    book.add([(of("sql"), Activity(1))])
    assert [busy.adapter for busy in book.busiest()] == [Adapter("ada", "sql", SQL.digest)]
    clock.now_s += WINDOW_S + 1
    assert list(book.busiest()) == []
    assert book.stats(SQL, tenant_id="ada").activity.num_requests == 1


class Recorded:
    """A gauge, a counter or a histogram that writes down what it is told."""

    told: dict[str, dict[tuple[str, ...], float]]

    def __init__(self, name: str, *_: Any, tag_keys: tuple[str, ...] = (), **__: Any) -> None:
        self._name, self._tag_keys = name, tag_keys

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        assert set(tags or {}) == set(self._tag_keys), f"{self._name}: Ray refuses missing and unknown tags"
        self.told.setdefault(self._name, {})[tuple((tags or {})[key] for key in self._tag_keys)] = value

    def inc(self, value: float = 1, tags: Mapping[str, str] | None = None) -> None:
        self.set(value, tags)

    observe = inc


def test_series_of_adapters_are_few_and_name_the_short_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "told", {}, raising=False)
    monkeypatch.setattr(exported, "Gauge", Recorded)
    book = AdapterStatsTable(Clock())
    gauges = exported.AdapterGauges(book)
    gauges.repeat()
    assert Recorded.told == {}
    for index in range(100):
        activity = Activity(6, 3, 60, 30, 60 * (index + 1)).plus(first_token(0.1))
        book.add([(of(f"a{index}", f"{index:02}" * 32), activity)])
        book.record_load("device", f"{index:02}" * 32, 6)
    gauges.repeat()
    told = Recorded.told
    label = ("ada", "a99", "99" * 6)
    assert told["polylora_adapter_requests_per_second"][*label, "error"] == pytest.approx(3 / WINDOW_S)
    assert told["polylora_adapter_requests_per_second"][*label, "ok"] == pytest.approx(3 / WINDOW_S)
    assert told["polylora_adapter_tokens_per_second"][*label, "completion"] == pytest.approx(100.0)
    assert told["polylora_adapter_time_to_first_token_seconds"][*label, "0.99"] == pytest.approx(0.1, rel=0.2)
    assert told["polylora_adapter_loads_per_second"][*label, "device"] == pytest.approx(0.1)
    assert told["polylora_adapter_loads_per_second"]["", "other", "", "device"] == pytest.approx(6.8)
    for name, series in told.items():
        assert len({key[:3] for key in series}) == MAX_NAMED + 1, name
        assert ("ada", "a0", "00" * 6) not in {key[:3] for key in series}


def test_loads_of_the_store_s_tiers_are_heard_from_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorded, "told", {}, raising=False)
    for kind in ("Counter", "Histogram", "SteadyGauge"):
        monkeypatch.setattr(f"app.deployments.store.metrics.{kind}", _recorded_by_position)
    book = AdapterStatsTable(Clock())
    counts = TierMetrics(book.record_load)
    with ThreadPoolExecutor(4) as pool:
        for tier in ("source", "disk"):
            list(pool.map(lambda _, tier=tier: counts.record_load(tier, 0.1, 10, SQL.digest), range(50)))
    counts.record_load("device", 0.1, 10)  # it is not known which
    assert book.stats(SQL, tenant_id=None).num_loads == {"source": 50, "disk": 50}
    assert counts.of("device")["loads"] == 1


def _recorded_by_position(name: str, text: str, tag_keys: tuple[str, ...] = (), **_: Any) -> Recorded:
    return Recorded(name, text, tag_keys=tag_keys)
