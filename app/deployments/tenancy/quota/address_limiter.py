"""Calls per minute of clients that no project stands for, by address.

Counted in this process only: an address has no row that a lessor could find, and n ingresses admit n times the limit.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from app.deployments.tenancy.quota.limits import PERIOD_S, GcraCounter, LimitError

#: Addresses that are remembered; the one that called longest ago is forgotten first.
MAX_ADDRESSES = 10_000
#: One client owns a network of this length.
_IPV6_PREFIX = 64


class AddressLimiter:
    """`limit`: calls per minute of one address, None for no limit. `clock` gives monotonic seconds."""

    def __init__(self, limit: int | None, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._counters: dict[str, GcraCounter] = {}  # the last caller last

    def take(self, address: str, amount: int = 1) -> None:
        """Count calls of an address. Raises LimitError, and then counts nothing."""
        if self.limit is None:
            return
        network = _network(address)
        counter = self._counters.pop(network, None) or GcraCounter(self.limit, PERIOD_S["calls"])
        self._counters[network] = counter
        if len(self._counters) > MAX_ADDRESSES:
            del self._counters[next(iter(self._counters))]
        now_s = self._clock()
        if (missing := amount - counter.remaining(now_s)) > 0:
            wait_s = missing * PERIOD_S["calls"] / max(1, self.limit)
            raise LimitError(
                f"this address has sent {self.limit} calls within a minute, the limit without a project's key; try "
                f"again in {wait_s:.3g} s",
                "calls",
                wait_s,
            )
        counter.charge(amount, now_s)


def _network(address: str) -> str:
    """What stands for one client: an IPv4 address, or an IPv6 network."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
    except ValueError:
        return address
