"""The registry of adapters as this ingress knows it: a copy that follows its owner.

In: the store's call that waits for changes. Out: a `RegistryView`, read from this process's memory. While the
store is away the copy stands: that costs freshness, never an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.deployments.links.published import Changes, Version
from app.deployments.links.watched import Follower, Watch
from app.deployments.registry.view import Entry, Key, RegistryView

#: An ingress asks so often, news or none: one that has ended is waited for no longer than it takes to miss that.
HEARTBEAT_S = 1.0


class WatchedRegistry(Follower[Changes[Key, Entry]]):
    """The registry's table, copied by its changes into `view`. `complete` is set when there is nothing to catch up.

    `on_number` is told how many adapters there are, after each change.
    """

    def __init__(self, watch: Watch[Changes[Key, Entry]], watcher_id: str, on_number: Callable[[int], None]) -> None:
        super().__init__(watch, watcher_id, HEARTBEAT_S)
        self._on_number = on_number
        self.view = RegistryView()
        self.complete = asyncio.Event()

    def _take(self, version: Version, news: Changes[Key, Entry]) -> None:
        self._held = version
        self.view.take(news)
        self._on_number(self.view.num_adapters)
        if news.is_last:
            self.complete.set()
