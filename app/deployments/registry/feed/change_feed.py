"""The registry as every process sees it: published tables that follow the database.

In: changes of the database, whoever makes them. Out: the table of names, the pins and the traffic shares, published in
the order in which the database took the changes: those made through this object at once, those of other processes
within `POLL_INTERVAL_S`. A change returns when every living ingress holds it, those of other stores included, so that
"loaded" means routable everywhere. What watchers hold is never replaced by an older registry or another one: that is
`NotReady`, and so is every change while the database is older than what is published. Once it has caught up (it was a
copy that lagged behind) everything is compared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from app.deployments.registry.db.database import older_database_error
from app.deployments.registry.feed.change_query import RegistryChanges
from app.deployments.registry.feed.view import Entry, Key
from app.deployments.registry.models import CatalogEntry
from app.deployments.registry.pins import Pins, PinTable
from app.deployments.registry.registry import Registry
from app.deployments.registry.traffic_shares import TrafficShares
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.long_poll_host import LongPollHost, LongPollTable, Version
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)
E = TypeVar("E")

#: How long a change waits for every ingress to hold it.
SETTLE_TIMEOUT_S = 5.0
#: How often the database is asked for changes of others, and how often others are asked whether they hold a change.
POLL_INTERVAL_S = 0.5
_ASK_INTERVAL_S = 0.1
#: How long a store that follows another waits for the other's ingresses to come before it takes who came for everybody.
FOLLOWERS_COME_S = 2.0


class ChangeFeed:
    """One event loop; the database is called in threads. `pin` is given the pinned digests whenever they change."""

    def __init__(self, registry: Registry, pin: Callable[[frozenset[str]], None]) -> None:
        """Takes a place among the stores, and reads the whole registry. Raises NotReady."""
        registry.stores.enter()
        self._pin = pin
        self._registry = registry
        self._tasks = Tasks()
        self._publishing = asyncio.Lock()  # what is newer is published once, and in order
        self._next: asyncio.Task[bool] | None = None  # the look at the database that has not begun
        origin, changes = registry.database.origin, registry.change_query.since(0)
        self._revision = changes.revision
        self._was_older = False  # the database than what is published, when it was last looked at
        entries = [entry for _, entry in changes.rows if entry is not None]
        adapters = [entry for entry in entries if isinstance(entry, CatalogEntry)]
        grace_s = FOLLOWERS_COME_S if registry.stores.follows_another else 0.0
        self.table: LongPollTable[Key, Entry] = LongPollTable(time.monotonic, origin=origin, grace_s=grace_s)
        self._pin_table, self._traffic_shares = PinTable(adapters), TrafficShares(adapters)
        self.pins: LongPollHost[Pins] = LongPollHost(self._pin_table.value, time.monotonic, origin=origin)
        self.shares: LongPollTable[str, float] = LongPollTable(time.monotonic, origin=origin)
        self._stamp(changes.revision)
        self.table.publish({(entry.tenant_id, entry.name): entry for entry in entries})
        self.shares.publish(self._traffic_shares.value)
        pin(self._pin_table.value.digests)

    @property
    def revision(self) -> int:
        """Of the newest change that is published."""
        return self._revision

    def check_version(self, held: Version | None) -> None:
        """Raises NotReady if a watcher holds what this registry cannot know: its own copy is the better one."""
        if held is None or not held.origin:
            return
        if held.origin != self.table.origin:
            raise NotReady("the registry's database is another one than before; its copies are kept", retry_after_s=5)
        if held.revision > self._revision:
            raise NotReady(
                f"the registry's database is at change {self._revision} but a copy is at {held.revision}; its copies "
                "are kept", retry_after_s=5,
            )  # fmt: skip

    async def change(self, call: Callable[[], E]) -> E:
        """Change the database by `call`, in a thread, and publish what has changed. None: nothing has.

        The work is a task of its own: a caller that leaves in between must not part the database and the table.
        """

        async def change() -> E:
            entry = await asyncio.to_thread(call)
            if entry is not None:
                await self._settle()
            return entry

        return await asyncio.shield(self._tasks.start(change()))

    async def publish_newer(self) -> bool:
        """Publish what others have changed; whether there was anything. Raises NotReady.

        Who asks while a look at the database is under way shares the next one: it sees what all of them have written.
        """
        if self._next is None:
            self._next = self._tasks.start(self._publish_changes())
        return await asyncio.shield(self._next)

    async def _publish_changes(self) -> bool:
        async with self._publishing:
            self._next = None
            changes = await self._changes_since(self._revision)
            if self._was_older:  # some of what is published may never have been in this database
                changes = await self._changes_since(0)
                meant = {key for key, _ in changes.rows}
                changes = changes._replace(
                    rows=[*((key, None) for key in self.table.present() if key not in meant), *changes.rows]
                )
                self._was_older = False
            self._publish(changes)
            return bool(changes.rows)

    async def _changes_since(self, after: int) -> RegistryChanges:
        """Raises NotReady if the database is older than what is published."""
        changes = await asyncio.to_thread(self._registry.change_query.since, after)
        if changes.revision < self._revision:
            self._was_older = True
            raise older_database_error(self._revision)
        return changes

    async def _settle(self) -> None:
        """Return when every ingress holds what has just been written; after a while, with a line in the log, anyway."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self.publish_newer()
                revision = self._revision
                await self.table.settled(SETTLE_TIMEOUT_S)
                while any(held < revision for held in await self._peer_revisions()):
                    await asyncio.sleep(_ASK_INTERVAL_S)
        except TimeoutError:
            logger.warning("an ingress did not take over a change of the registry in %g s", SETTLE_TIMEOUT_S)
        except NotReady as error:  # it is written down; the next look at the database finds it
            logger.warning("a change of the registry is published later: %s", error)

    async def _peer_revisions(self) -> list[int]:
        return list((await asyncio.to_thread(self._registry.stores.others)).values())

    def _publish(self, changes: RegistryChanges) -> None:
        self._stamp(changes.revision)
        self.table.publish(dict(changes.rows))
        are_pins_new = [self._pin_table.apply(key, entry) for key, entry in changes.rows]
        if any(are_pins_new):
            self._pin(self._pin_table.value.digests)
            self.pins.publish(self._pin_table.value)
        shares: dict[str, float | None] = {}
        for key, entry in changes.rows:
            shares |= self._traffic_shares.apply(key, entry)
        self.shares.publish(shares)

    def _stamp(self, revision: int) -> None:
        self._revision = self._registry.database.known_revision = revision
        for published in (self.table, self.pins, self.shares):
            published.revision = revision
