"""A queue with one reader, for what arrives once per token.

In: items, given to `put` on the event loop. Out: the same items in the same order, one per `get`. Rule: one task reads.
An `asyncio.Queue`, which is made for many readers, costs three times as much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """It has no bound, so that `put` never waits."""

    __slots__ = ("_items", "_news")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._news: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._news is not None and not self._news.done():  # done: its reader is on its way, or was cancelled
            self._news.set_result(None)

    async def get(self) -> T:
        """Take the first item that is left; waits for one."""
        while not self._items:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._items.popleft()
