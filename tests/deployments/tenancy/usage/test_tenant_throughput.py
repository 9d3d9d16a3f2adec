"""The largest tenants are told and all others together, whoever they are and however many."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.tenancy import metrics as exported
from app.deployments.tenancy.quota.rate_limiter import RateLimiter, RejectedRequest
from app.deployments.tenancy.usage.flusher import LedgerKey, Row, UsageRecord
from app.deployments.tenancy.usage.tenant_throughput import (
    MAX_NAMED,
    OTHER,
    WINDOW_S,
    ServedTokens,
    TenantThroughput,
    jain_index,
)
from tests.budgets import examples
from tests.deployments.recorded import record


def row(tenant: str, completion: int, *, prompt: int = 0) -> Row:
    return LedgerKey(0, tenant, "k", "m", "", "completions"), UsageRecord(1, prompt, 0, completion)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@settings(max_examples=examples(40), deadline=None)
@given(tokens=st.lists(st.integers(0, 1000), max_size=100))
def test_named_and_others_are_everybody(tokens: list[int]) -> None:
    attained = TenantThroughput(lambda _: 1.0, Clock())
    for index, number in enumerate(tokens):
        attained.add([row(f"t{index}", number)])
    served = attained.by_tenant()
    assert len(served) <= MAX_NAMED + 1
    assert sum(each.completion for each in served.values()) * WINDOW_S == pytest.approx(sum(tokens))
    named = [each.completion for name, each in served.items() if name != OTHER]
    left = sorted(tokens, reverse=True)[MAX_NAMED:]
    assert not left or min(named) * WINDOW_S >= left[0] - 1e-9


def test_what_was_long_ago_is_forgotten() -> None:
    clock = Clock()
    attained = TenantThroughput(lambda _: 1.0, clock)
    attained.add([row("old", 60)])
    clock.now_s += WINDOW_S / 2
    attained.add([row("new", 120, prompt=6)])
    assert set(attained.by_tenant()) == {"old", "new"}
    clock.now_s += WINDOW_S / 2 + 1
    assert attained.by_tenant() == {"new": ServedTokens(0.1, 0.0, 2.0, 0.0)}


def test_jain_s_index_weighs_service() -> None:
    weights = {"a": 1.0, "b": 3.0}
    attained = TenantThroughput(weights.__getitem__, Clock())
    assert attained.jain_index() == 1.0
    attained.add([row("a", 100), row("b", 300)])
    assert attained.jain_index() == pytest.approx(1.0)
    attained.add([row("a", 200)])
    assert attained.jain_index() == pytest.approx(jain_index([300, 100]))
    assert jain_index([5, 0, 0, 0]) == pytest.approx(0.25)


def test_series_are_few_and_refusals_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = record(monkeypatch, exported, ("Counter", "Gauge"))
    attained = TenantThroughput(lambda _: 1.0, Clock())
    attained.add([row(f"t{index}", 60 * (index + 1)) for index in range(100)])
    exported.TenantGauges(attained).repeat()
    names = {tags["tenant"] for _, _, tags in told if "tenant" in tags}
    assert len(names) == MAX_NAMED + 1
    assert {"t99", OTHER} <= names
    assert "t0" not in names
    told.clear()

    async def lend(*_: object) -> list[Any]:
        return []

    limiter = RateLimiter(lend, "ingress", Clock())
    limiter.rejected[RejectedRequest("tokens", is_enforced=True)] += 3
    refusals = exported.RejectionCounters(limiter)
    refusals.repeat()
    refusals.repeat()
    limiter.rejected[RejectedRequest("tokens", is_enforced=True)] += 1
    refusals.repeat()
    tags = {"reason": "tokens", "enforced": "yes"}
    assert told == [("polylora_rate_limit_rejections", 3, tags), ("polylora_rate_limit_rejections", 1, tags)]
