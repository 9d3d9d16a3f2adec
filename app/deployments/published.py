"""A value that one process owns and many watch.

In: `publish(value)`. Out: every watcher's pending call returns at once with the new value; a watcher
that was away gets the newest, never a stale one. Asking for what comes after version v tells the
owner that the watcher holds v, which lets the owner wait until everybody does: "loaded" can then
mean that every ingress knows.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Version(NamedTuple):
    """`epoch` differs between two lives of the owner, so that a restart is never mistaken for no news."""

    epoch: str
    number: int


class Published(Generic[T]):
    """The owner's side: one asyncio loop, no threads."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = Version(uuid.uuid4().hex, 0)
        self._news = asyncio.Event()
        self._held: dict[str, tuple[Version, float]] = {}

    @property
    def current(self) -> tuple[Version, T]:
        return self._version, self._value

    def publish(self, value: T) -> None:
        self._value = value
        self._version = self._version._replace(number=self._version.number + 1)
        self._news.set()
        self._news = asyncio.Event()

    async def newer(self, held: Version | None, watcher_id: str, timeout_s: float) -> tuple[Version, T] | None:
        """The newest value as soon as it differs from `held`; None when nothing came within the timeout."""
        if held is not None:
            self._held[watcher_id] = (held, time.monotonic() + 2 * timeout_s)
        if held == self._version:
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return None
        return self._version, self._value

    async def settled(self, timeout_s: float) -> bool:
        """Wait until every living watcher holds the present version. False if one did not say so in time."""
        target, deadline_s = self._version, time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            now_s = time.monotonic()
            self._held = {watcher: held for watcher, held in self._held.items() if held[1] > now_s}
            if all(held[0].epoch != target.epoch or held[0].number >= target.number for held in self._held.values()):
                return True
            await asyncio.sleep(0.002)
        return False
