"""Meters: what a rate and a count let through, whoever takes in whatever order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.tenancy.models import RateLimit, Tenant, TenantLimits
from app.deployments.tenancy.quota.limits import (
    BudgetCounter,
    Cost,
    GcraCounter,
    LimitKey,
    SpendLimitError,
    month_of,
    month_start_s,
    refusal,
    request_costs,
)
from tests.budgets import examples


@settings(max_examples=examples(100), deadline=None)
@given(
    limit=st.integers(1, 50),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 20)), max_size=60),
)
def test_a_rate_lets_through_its_limit_at_once_and_no_more_in_any_time(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    """In every window of w seconds at most limit + limit * w / period units (the definition of GCRA's conformance)."""
    counter, now_s = GcraCounter(limit, 60.0), 1e9
    taken: list[tuple[float, int]] = []
    for wait_s, amount in steps:
        now_s += wait_s
        taken.append((now_s, counter.take(amount, now_s)))
    for start, (start_s, _) in enumerate(taken):
        total = 0
        for end_s, amount in taken[start:]:
            total += amount
            assert total <= limit + limit * (end_s - start_s) / 60.0 + 1e-3


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 100), st.lists(st.tuples(st.floats(0, 5), st.integers(1, 30), st.integers(0, 30)), max_size=40))
def test_what_is_given_back_is_there_again(limit: int, steps: list[tuple[float, int, int]]) -> None:
    counter, now_s = GcraCounter(limit, 60.0), 1e9
    for wait_s, amount, back in steps:
        now_s += wait_s
        before = counter.remaining(now_s)
        got = counter.take(amount, now_s)
        assert got == min(amount, before)
        counter.refund(min(back, got), now_s)
        assert abs(counter.remaining(now_s) - (before - got + min(back, got))) <= 1
        assert 0 <= counter.remaining(now_s) <= limit


@pytest.mark.parametrize("limit", [7, 60, 1000])
def test_at_a_steady_load_of_the_limit_nothing_is_refused(limit: int) -> None:
    counter, now_s, refused = GcraCounter(limit, 60.0), 1e9, 0
    for _ in range(10 * limit):
        refused += 1 - counter.take(1, now_s)
        now_s += 60.0 / limit
    assert refused <= 0.01 * 10 * limit


def test_a_new_limit_keeps_what_is_used() -> None:
    counter = GcraCounter(10, 60.0)
    counter.take(8, 0.0)
    counter.set_limit(20, 0.0)
    assert counter.remaining(0.0) == 12
    counter.set_limit(5, 0.0)
    assert counter.remaining(0.0) == 0
    counter.set_limit(0, 0.0)
    assert counter.take(1, 1e9) == 0


def test_a_count_believes_totals_however_often_they_are_told() -> None:
    counter = BudgetCounter(10, is_spent=True)
    assert counter.take("a", 6) == 6
    assert counter.take("b", 6) == 4
    for _ in range(3):
        counter.report("a", 2, 3)
        counter.report("b", 4, 0)
    assert counter.remaining() == 10 - 2 - 4 - 0, "what a has used before it was first heard is in the ledger"
    counter.report("a", 1, 4)
    counter.report("a", 1, 4)
    assert (counter.used, counter.remaining()) == (1, 10 - 1 - 1 - 4)
    counter.expire(["b"])
    assert counter.remaining() == 4, "it may have used what it held"
    counter.reconcile(1)
    assert counter.remaining() == 8


def test_a_request_takes_of_the_base_s_limits_and_of_its_adapters() -> None:
    rates = {"base": RateLimit(10, 1000, None), "sql": RateLimit(None, 100, 5), "other": RateLimit(1, 1, 1)}
    tenant = Tenant("t", "t", 0.0, limits=TenantLimits(rates, max_concurrent=3, spend_cents=7))
    needs = request_costs(
        tenant, "base", [Cost(("base",), 30, 1), Cost(("sql",), 50, 2), Cost(("a+sql", "a", "sql"), 20, 2)]
    )
    assert needs == {
        LimitKey("t", "requests", "base"): 1,
        LimitKey("t", "tokens", "base"): 100,
        LimitKey("t", "tokens", "sql"): 70,
        LimitKey("t", "day", "sql"): 1,
        LimitKey("t", "concurrent"): 3,
        LimitKey("t", "spend"): 5,
    }
    assert request_costs(Tenant("t", "t", 0.0), "base", [Cost(("base",), 30, 1)]) == {}


def test_who_is_refused_hears_the_value_the_limit_and_the_way_out() -> None:
    later = refusal(LimitKey("t", "tokens", "base"), 50, 1000, 6.0)
    assert later.retry_after_s == 6.0
    assert "tokens per minute of model 'base'" in str(later)
    never = refusal(LimitKey("t", "tokens", "base"), 5000, 1000, math.inf)
    assert never.retry_after_s is None
    assert "5000" in str(never)
    wide = refusal(LimitKey("t", "concurrent"), 64, 10, math.inf)
    assert "needs 64 of the project's concurrent sequences, and the limit is 10; lower n" in str(wide)
    money = refusal(LimitKey("t", "spend"), 5, 1_500_000_000, math.inf)
    assert isinstance(money, SpendLimitError)
    assert "1.50 USD" in str(money)


def test_months_are_utc_s() -> None:
    assert month_of(0.0) == "1970-01"
    assert month_start_s(1_000_000_000.0) == 999_302_400.0
    assert month_of(999_302_399.0) == "2001-08"
