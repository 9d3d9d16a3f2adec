"""What the names of adapters mean now.

In: a tenant and a name or alias. Out: the adapter that a request for it goes to. An adapter that is on no device is
read ahead by the store, while its request is tokenized and given to a replica. Rule: a read that is on its way is not
asked for again.
"""

from __future__ import annotations

import logging
from typing import Protocol

from app.deployments.links.tasks import Tasks
from app.deployments.placement.placer import Placer
from app.deployments.registry.view import RegistryView
from app.engine.adapters.card import AdapterRef
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)


class ReadAhead(Protocol):
    """The part of `StoreClient` that is used here."""

    async def expect(self, ref: AdapterRef) -> None:
        """Read this adapter: a replica will ask for it soon."""
        ...


class AdapterNames:
    """One per ingress, over its copy of the registry and of placement's table."""

    def __init__(self, registry: RegistryView, placer: Placer, store: ReadAhead) -> None:
        self._registry = registry
        self._placer = placer
        self._store = store
        self._expected: set[str] = set()  # digests that the store is reading for us
        self._tasks = Tasks()

    def resolve(self, name: str, sticky_key: str, tenant_id: str) -> AdapterRef | None:
        """The adapter; equal keys choose the same one of an alias's. None: there is no such name."""
        ref = self._registry.resolve(name, sticky_key, tenant_id)
        if ref is not None and ref.digest not in self._expected and not self._placer.table.is_resident(ref.digest):
            self._expected.add(ref.digest)
            self._tasks.start(self._expect(ref))
        return ref

    def text(self, ref: AdapterRef) -> str:
        """What of the adapter's chat template and special tokens is its own (`AdapterCard.text`)."""
        return self._registry.text(ref)

    async def close(self) -> None:
        await self._tasks.close()

    async def _expect(self, ref: AdapterRef) -> None:
        try:
            await self._store.expect(ref)
        except NotReady as error:
            logger.info("adapter %s is not read ahead: %s", ref.name, error)
        finally:
            self._expected.discard(ref.digest)
