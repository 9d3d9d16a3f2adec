"""Calls of clients without a project, by address."""

from __future__ import annotations

import pytest

from app.deployments.tenancy.quota import address_limiter
from app.deployments.tenancy.quota.address_limiter import AddressLimiter
from app.deployments.tenancy.quota.limits import LimitError


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_an_address_has_a_minutes_calls_at_once_and_then_gets_them_back_evenly() -> None:
    clock = Clock()
    limiter = AddressLimiter(60, clock)
    limiter.take("10.0.0.1", 59)
    limiter.take("10.0.0.1")
    with pytest.raises(LimitError, match=r"60 calls within a minute.*again in 2 s") as refused:
        limiter.take("10.0.0.1", 2)
    assert refused.value.retry_after_s == pytest.approx(2)
    limiter.take("10.0.0.2", 60)
    clock.now_s += 2
    limiter.take("10.0.0.1", 2)  # the refusal took nothing
    with pytest.raises(LimitError):
        limiter.take("10.0.0.1")


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    limiter = AddressLimiter(1, Clock())
    limiter.take("2001:db8::1")
    with pytest.raises(LimitError):
        limiter.take("2001:db8::ffff:1")
    limiter.take("2001:db8:0:1::1")
    limiter.take("not:an:address")
    with pytest.raises(LimitError):
        limiter.take("not:an:address")


def test_the_address_that_called_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_limiter, "MAX_ADDRESSES", 2)
    limiter = AddressLimiter(2, Clock())
    for address in ("a", "b", "a", "c"):
        limiter.take(address)
    limiter.take("b", 2)
    with pytest.raises(LimitError):
        limiter.take("c", 2)


def test_without_a_limit_nothing_is_refused_and_with_0_everything() -> None:
    AddressLimiter(None, Clock()).take("a", 10**9)
    with pytest.raises(LimitError):
        AddressLimiter(0, Clock()).take("a")
