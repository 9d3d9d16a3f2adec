"""Bounds that tenants share fairly, for whatever the fair queue does not reach: calls, entries, or bytes.

`FairLimiter` admits at once or refuses, `SharedFairLimiter` does so for several threads; `FairSemaphore` lets callers
wait for a place. The tenant that uses most is refused first: when there is no room, its newest entry gives way to a
tenant that uses less, even with the new entry. Every operation takes O(log n) amortised. Errors give the limit and the
caller's own use, never that of other tenants.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Iterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from app.engine.errors import QueueFull

K = TypeVar("K", bound=Hashable)


class FairLimiter(Generic[K]):
    """At most `max_total` units, held by entries of tenants; `max_total` may change. One thread at a time."""

    def __init__(self, name: str, max_total: int, *, retry_after_s: float = 1.0) -> None:
        """`name` says in errors what is limited: a setting, or a description."""
        self.name = name
        self.max_total = max_total
        self.num_used = 0
        self._retry_after_s = retry_after_s
        self._entries: dict[str, dict[K, int]] = {}  # by tenant, in order of arrival
        self._tenant_of: dict[K, str] = {}
        self._used: dict[str, int] = {}
        self._most = _Ranking()

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, key: K) -> bool:
        return key in self._tenant_of

    def used_by(self, tenant_id: str) -> int:
        """Units that a tenant holds."""
        return self._used.get(tenant_id, 0)

    def entries_of(self, tenant_id: str) -> Iterator[K]:
        """A tenant's entries, the oldest first."""
        return iter(self._entries.get(tenant_id, ()))

    def add(self, key: K, tenant_id: str, size: int = 1, *, is_forced: bool = False) -> list[tuple[K, QueueFull]]:
        """Admit an entry; returns those that gave way, which are removed, each with the error for it.

        `is_forced` admits above the limit. Raises QueueFull, and changes nothing, if there is no room and the tenant
        would hold as much as each other.
        """
        assert size > 0, "an entry has a size"
        assert key not in self._tenant_of, "an entry is added once"
        removed: list[tuple[K, str, int]] = []
        own = self.used_by(tenant_id) + size
        while not is_forced and self.num_used + size > self.max_total:
            most = self._most.first()
            if most is None or own >= self._used[most]:
                for old, owner, old_size in reversed(removed):
                    self._insert(old, owner, old_size)
                raise self._error(tenant_id)
            newest = next(reversed(self._entries[most]))
            removed.append((newest, most, self._entries[most][newest]))
            self.remove(newest)
        self._insert(key, tenant_id, size)
        return [(old, self._error(owner)) for old, owner, _ in removed]

    def remove(self, key: K) -> None:
        """Release an entry; no effect if it is not here."""
        tenant_id = self._tenant_of.pop(key, None)
        if tenant_id is None:
            return
        size = self._entries[tenant_id].pop(key)
        self._change(tenant_id, -size)
        if not self._entries[tenant_id]:
            del self._entries[tenant_id], self._used[tenant_id]
            self._most.remove(tenant_id)

    def _insert(self, key: K, tenant_id: str, size: int) -> None:
        self._tenant_of[key] = tenant_id
        self._entries.setdefault(tenant_id, {})[key] = size
        self._change(tenant_id, size)

    def _change(self, tenant_id: str, size: int) -> None:
        self.num_used += size
        self._used[tenant_id] = self._used.get(tenant_id, 0) + size
        self._most.set(tenant_id, (-self._used[tenant_id], 0))

    def _error(self, tenant_id: str) -> QueueFull:
        return QueueFull(
            f"{self.name} is {self.max_total}, which is reached; {self.used_by(tenant_id)} are in use by this project; "
            "send it again later",
            retry_after_s=self._retry_after_s,
        )


class SharedFairLimiter(FairLimiter[K]):
    """A limiter to which several threads add. Entries leave by `release`, which never waits for those threads."""

    def __init__(self, name: str, max_total: int) -> None:
        super().__init__(name, max_total)
        self._lock = threading.Lock()  # between threads that add
        self._released: deque[K] = deque()  # no entries any more, once the next is added

    def add(self, key: K, tenant_id: str, size: int = 1, *, is_forced: bool = False) -> list[tuple[K, QueueFull]]:
        """See `FairLimiter.add`. Any thread."""
        with self._lock:
            while self._released:
                self.remove(self._released.popleft())
            return super().add(key, tenant_id, size, is_forced=is_forced)

    def release(self, *keys: K) -> None:
        """Make room in the next `add`; no effect if they are not here. Any thread; takes no lock."""
        self._released.extend(keys)


class FairSemaphore:
    """Places that calls hold while they work. One event loop.

    The waiting call of the tenant that holds least goes first; among equals, the tenant whose turn is longest ago. A
    tenant at `max_per_tenant` waits for its own calls and holds up no other tenant.
    """

    def __init__(
        self, name: str, max_total: int, *, max_per_tenant: int | None = None, max_waiting: int = 1024
    ) -> None:
        """`max_waiting` calls wait at a time, 0: none; the newest of the tenant with most of them gives way."""
        self.max_total = max_total
        self.max_per_tenant = max_total if max_per_tenant is None else max_per_tenant
        self._name = name
        self._num_held = 0
        self._held: dict[str, int] = {}
        self._waiting: FairLimiter[_Waiter] = FairLimiter(f"the number of calls that wait for {name}", max_waiting)
        self._next = _Ranking()  # tenants with a waiting call that `max_per_tenant` allows
        self._turns: dict[str, int] = {}  # tenant with a waiting call -> when it came, or had its last turn
        self._clock = itertools.count()

    def held_by(self, tenant_id: str) -> int:
        """Places that a tenant's calls hold."""
        return self._held.get(tenant_id, 0)

    @asynccontextmanager
    async def hold(self, tenant_id: str) -> AsyncGenerator[None]:
        """Hold a place while the block runs, after a wait if necessary.

        Raises QueueFull if too many calls wait. A deadline is the caller's: cancelling a waiting call is safe.
        """
        await self._acquire(tenant_id)
        try:
            yield
        finally:
            self._release(tenant_id)

    async def _acquire(self, tenant_id: str) -> None:
        is_free = self._num_held < self.max_total and self._next.first() is None
        if is_free and tenant_id not in self._turns and self.held_by(tenant_id) < self.max_per_tenant:
            self._take(tenant_id)
            return
        if not self._waiting.max_total:
            raise QueueFull(
                f"{self._name}: the limit is {self.max_total} at a time, {self.max_per_tenant} for one project; "
                "send it again later"
            )
        waiter = _Waiter(tenant_id)
        for other, error in self._waiting.add(waiter, tenant_id):
            if not other.turn.done():
                other.turn.set_exception(error)
            self._rank(other.tenant_id)
        self._turns.setdefault(tenant_id, next(self._clock))
        self._rank(tenant_id)
        self._admit()
        try:
            await waiter.turn
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._rank(tenant_id)
                self._admit()
            elif waiter.is_admitted:  # and cancelled at the same time
                self._release(tenant_id)
            raise

    def _take(self, tenant_id: str) -> None:
        self._num_held += 1
        self._held[tenant_id] = self.held_by(tenant_id) + 1

    def _release(self, tenant_id: str) -> None:
        self._num_held -= 1
        self._held[tenant_id] -= 1
        if not self._held[tenant_id]:
            del self._held[tenant_id]
        self._rank(tenant_id)
        self._admit()

    def _rank(self, tenant_id: str) -> None:
        """Note whether, and when, it is this tenant's turn."""
        waiter = next(self._waiting.entries_of(tenant_id), None)
        if waiter is None:
            self._turns.pop(tenant_id, None)
        if waiter is not None and self.held_by(tenant_id) < self.max_per_tenant:
            self._next.set(tenant_id, (self.held_by(tenant_id), self._turns[tenant_id]))
        else:
            self._next.remove(tenant_id)

    def _admit(self) -> None:
        """Admit waiting calls while there are places."""
        while self._num_held < self.max_total and (tenant_id := self._next.first()) is not None:
            waiter = next(self._waiting.entries_of(tenant_id))
            self._waiting.remove(waiter)
            self._take(tenant_id)
            self._turns[tenant_id] = next(self._clock)
            self._rank(tenant_id)
            waiter.is_admitted = True
            if not waiter.turn.done():
                waiter.turn.set_result(None)


class _Waiter:
    """A waiting call. `turn` is done when it is admitted, has given way, or was cancelled."""

    __slots__ = ("is_admitted", "tenant_id", "turn")

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.is_admitted = False
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Ranking:
    """Names by value, the least first."""

    __slots__ = ("_heap", "_values")

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], str]] = []  # with former values, which are skipped

    def set(self, name: str, value: tuple[int, int]) -> None:
        self._values[name] = value
        heapq.heappush(self._heap, (value, name))
        if len(self._heap) > 2 * len(self._values) + 16:
            self._heap = [(value, name) for name, value in self._values.items()]
            heapq.heapify(self._heap)

    def remove(self, name: str) -> None:
        self._values.pop(name, None)

    def first(self) -> str | None:
        while self._heap:
            value, name = self._heap[0]
            if self._values.get(name) == value:
                return name
            heapq.heappop(self._heap)
        return None
