"""The registry as every process sees it: three published values that follow the database.

In: changes of the database, one at a time. Out: the table of names, the pins and the traffic shares, published in the
order in which the database took the changes. A change returns when every ingress holds it, so that "loaded" means
routable everywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from app.deployments.links.published import Published, PublishedTable
from app.deployments.links.tasks import Tasks
from app.deployments.registry.books import Registry
from app.deployments.registry.entries import AliasEntry, CatalogEntry
from app.deployments.registry.pins import PinBook, Pins
from app.deployments.registry.shares import ShareBook, Shares
from app.deployments.registry.view import Entry, Key

logger = logging.getLogger(__name__)
E = TypeVar("E", CatalogEntry, AliasEntry, CatalogEntry | None)

#: How long a change waits for every ingress to hold it.
SETTLE_TIMEOUT_S = 5.0


class PublishedRegistry:
    """One event loop; the database is called in threads. `pin` is given the pinned digests whenever they change."""

    def __init__(self, registry: Registry, pin: Callable[[frozenset[str]], None]) -> None:
        self._pin = pin
        self._tasks = Tasks()
        self._changing = asyncio.Lock()  # the database and the table change in the same order
        adapters = registry.catalog.entries()
        entries: list[Entry] = [*adapters, *registry.aliases.entries()]
        self.table: PublishedTable[Key, Entry] = PublishedTable()
        self.table.publish({(entry.tenant_id, entry.name): entry for entry in entries})
        self._pin_book, self._share_book = PinBook(adapters), ShareBook(adapters)
        self.pins: Published[Pins] = Published(self._pin_book.value)
        self.shares: Published[Shares] = Published(self._share_book.value)
        pin(self._pin_book.value.digests)

    async def change(self, call: Callable[[], E], *, is_gone: bool = False) -> E:
        """Change the database by `call`, in a thread, and publish the entry that it returns, or that it is gone.

        The work is a task of its own: a caller that leaves in between must not part the database and the table.
        """

        async def change() -> E:
            async with self._changing:
                entry = await asyncio.to_thread(call)
                if entry is None:
                    return entry
                self._publish((entry.tenant_id, entry.name), None if is_gone else entry)
            if not await self.table.settled(SETTLE_TIMEOUT_S):
                logger.warning("an ingress did not take over a change of the registry in %g s", SETTLE_TIMEOUT_S)
            return entry

        return await asyncio.shield(self._tasks.start(change()))

    def _publish(self, key: Key, entry: Entry | None) -> None:
        self.table.publish({key: entry})
        if self._pin_book.apply(key, entry):
            self._pin(self._pin_book.value.digests)
            self.pins.publish(self._pin_book.value)
        if self._share_book.apply(key, entry):
            self.shares.publish(self._share_book.value)
