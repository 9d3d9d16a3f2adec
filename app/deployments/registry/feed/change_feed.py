"""The change feed: published tables of names, pins and traffic shares that follow the database.

Changes are published in the database's order: those made through `ChangeFeed.change` at once, those of other processes
within `POLL_INTERVAL_S`. `change` returns when every living ingress has the change, other stores' ingresses included,
so "loaded" means routable everywhere. An older or a different registry never replaces what watchers have: until the
database has caught up, every change is NotReady; then (it was a lagging copy) everything is compared.
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

#: How long a change waits for every ingress to receive it.
SETTLE_TIMEOUT_S = 5.0
#: How often the database is polled for other processes' changes.
POLL_INTERVAL_S = 0.5
#: How often the heartbeats of other stores are read while a change waits for their ingresses.
_SETTLE_POLL_S = 0.1
#: How long a store that replaces another waits for that one's ingresses before it counts the present ones as all.
INGRESS_GRACE_S = 2.0


class ChangeFeed:
    """One event loop; the database is called in threads. `pin` receives the pinned digests when they change."""

    def __init__(self, registry: Registry, pin: Callable[[frozenset[str]], None]) -> None:
        """Enters the stores' table and reads the whole registry. Raises NotReady."""
        registry.stores.enter()
        self._pin = pin
        self._registry = registry
        self._tasks = Tasks()
        self._publishing = asyncio.Lock()  # changes are published once, in order
        self._next: asyncio.Task[bool] | None = None  # the next poll of the database, not begun yet
        origin, changes = registry.database.origin, registry.change_query.since(0)
        self._revision = changes.revision
        self._was_older = False  # whether the database was older than the published tables at the last poll
        entries = [entry for _, entry in changes.rows if entry is not None]
        adapters = [entry for entry in entries if isinstance(entry, CatalogEntry)]
        grace_s = INGRESS_GRACE_S if registry.stores.replaces_another else 0.0
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
        """The newest published revision."""
        return self._revision

    def check_version(self, known: Version | None) -> None:
        """Raises NotReady if a watcher has a newer revision than this registry, or another registry: its copy is the
        better one.
        """
        if known is None or not known.origin:
            return
        if known.origin != self.table.origin:
            raise NotReady(
                "the registry's database is not the one that ingresses follow; they keep their copies", retry_after_s=5
            )
        if known.revision > self._revision:
            raise NotReady(
                f"the registry's database is at change {self._revision} but an ingress is at {known.revision}; "
                "ingresses keep their copies", retry_after_s=5,
            )  # fmt: skip

    async def change(self, call: Callable[[], E]) -> E:
        """Run `call`, which changes the database, in a thread and publish the change; a result of None means no change.

        The work is a task of its own: if the caller is cancelled, the database and the table must not diverge.
        """

        async def change() -> E:
            entry = await asyncio.to_thread(call)
            if entry is not None:
                await self.settle()
            return entry

        return await asyncio.shield(self._tasks.start(change()))

    async def settle(self) -> None:
        """Wait until every ingress has the database's changes, at most `SETTLE_TIMEOUT_S`; a timeout is only logged."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self.publish_newer()
                revision = self._revision
                await self.table.wait_until_current(SETTLE_TIMEOUT_S)
                while any(known < revision for known in await self._peer_revisions()):
                    await asyncio.sleep(_SETTLE_POLL_S)
        except TimeoutError:
            logger.warning("an ingress did not receive a registry change within %g s", SETTLE_TIMEOUT_S)
        except NotReady as error:  # the change is stored; the next poll finds it
            logger.warning("a registry change will be published later: %s", error)

    async def publish_newer(self) -> bool:
        """Publish other processes' changes; returns whether there were any. Raises NotReady.

        Callers during a poll share the next one, which sees what all of them have written.
        """
        if self._next is None:
            self._next = self._tasks.start(self._publish_changes())
        return await asyncio.shield(self._next)

    async def _publish_changes(self) -> bool:
        async with self._publishing:
            self._next = None
            changes = await self._changes_since(self._revision)
            if self._was_older:  # some published rows may never have been in this database
                changes = await self._changes_since(0)
                meant = {key for key, _ in changes.rows}
                changes = changes._replace(
                    rows=[*((key, None) for key in self.table.present_keys() if key not in meant), *changes.rows]
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
        for host in (self.table, self.pins, self.shares):
            host.revision = revision
