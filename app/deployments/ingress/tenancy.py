"""What an ingress does about tenants beside every request: it knows their keys, and tells when keys were used.

In: the owner's table, and uses of keys. Out: a `TenantView`, read from this process's memory; one call a minute with
the keys that were used in it. Rule: no request waits for the owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from app.deployments.links.published import Changes, Version
from app.deployments.links.watched import Follower
from app.deployments.tenants.client import TenantsClient
from app.deployments.tenants.entries import TenantKey, TenantRow
from app.deployments.tenants.view import TenantView
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: How often it is told when keys were last used.
USE_INTERVAL_S = 60.0


class WatchedTenants(Follower[Changes[TenantKey, TenantRow]]):
    """The owner's table, copied by its changes into `view`. `complete` is set when there is nothing to catch up."""

    def __init__(self, owner: TenantsClient, watcher_id: str) -> None:
        super().__init__(owner.watch, watcher_id)
        self.view = TenantView()
        self.complete = asyncio.Event()

    def _take(self, version: Version, news: Changes[TenantKey, TenantRow]) -> None:
        self._held = version
        self.view.take(news)
        if news.is_last:
            self.complete.set()


class Tenancy:
    """One per ingress. `clock` gives Unix time."""

    def __init__(self, view: TenantView, owner: TenantsClient, clock: Callable[[], float]) -> None:
        self.view = view
        self.owner = owner
        self.clock = clock
        self._used_s: dict[str, float] = {}

    def note_use(self, key_id: str, now_s: float) -> None:
        """A key has let a request in."""
        self._used_s[key_id] = now_s

    async def keep_telling(self) -> None:
        """`tell` once a minute, until cancelled."""
        while True:
            await asyncio.sleep(USE_INTERVAL_S)
            await self.tell()

    async def tell(self) -> None:
        """Say when keys were used since the last time. What the owner does not hear is told with the next."""
        used_s, self._used_s = self._used_s, {}
        if not used_s:
            return
        try:
            await self.owner.note_use(used_s)
        except NotReady as error:
            self._used_s = used_s | self._used_s
            logger.info("the last use of %d keys is not written down yet: %s", len(used_s), error)
