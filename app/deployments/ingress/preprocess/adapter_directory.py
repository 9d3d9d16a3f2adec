"""What an ingress does with an adapter that a request names: it has the store read it ahead, and reads its card.

An adapter that is on no device is read by the store while its request is tokenized and given to a replica. An adapter
that was asked for a moment ago is not asked for again, and at most `MAX_EXPECTED` are read at a time: a replica asks
for the others when it needs them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from app.deployments.placement.placer import Placer
from app.deployments.registry.feed.view import RegistryView
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.adapters.card import AdapterRef, is_activated
from app.engine.adapters.combining.combination import is_composition, read_composition
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: An adapter that was asked for is not asked for again within this time.
AGAIN_AFTER_S = 5.0
#: Adapters that are read ahead at a time.
MAX_EXPECTED = 256
#: The store is told at most this often that an adapter will be asked for.
EXPECTED_S = 1.0


class AdapterDirectory:
    """One per ingress, over its copy of the registry and of placement's table. `clock` gives seconds."""

    def __init__(
        self, registry: RegistryView, placer: Placer, store: StoreService[SharedAdapter], clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._placer = placer
        self._store = store
        self._clock = clock
        self._asking: set[str] = set()  # digests that the store is being asked to read
        self._asked_s: dict[str, float] = {}  # those that it was asked for, and when, in that order
        self._tasks = Tasks()

    def expect(self, ref: AdapterRef) -> None:
        """A request with this adapter is on its way: have it read unless it is on a device.

        Whether one that is activated in the middle of a prompt is needed is known with the prompt's tokens.
        """
        if not self._placer.view.is_resident(ref.digest) and not self._registry.invocation(ref):
            self._read_ahead(ref)

    def needed(self, ref: AdapterRef | None, prompts: Sequence[Sequence[int]]) -> list[bool]:
        """For each prompt, in token ids, whether its answer needs the adapter (`app.engine.adapters.card`)."""
        if ref is None:
            return [False] * len(prompts)
        invocation = self._registry.invocation(ref)
        if not invocation:
            return [True] * len(prompts)
        found = [is_activated(token_ids, invocation) for token_ids in prompts]
        if any(found) and not self._placer.view.is_resident(ref.digest):
            self._read_ahead(ref)
        return found

    def text(self, ref: AdapterRef | None) -> str:
        """The chat template and special tokens that are the adapter's own (`AdapterCard.text`); "" for the base.

        Several at once have one between them, or the store refuses to combine them.
        """
        if ref is None:
            return ""
        if not is_composition(ref.uri):
            return self._registry.text(ref)
        return next(filter(None, (self.text(part.ref) for part in read_composition(ref.uri).parts)), "")

    async def close(self) -> None:
        await self._tasks.close()

    def _read_ahead(self, ref: AdapterRef) -> None:
        now_s = self._clock()
        while self._asked_s and now_s - next(iter(self._asked_s.values())) >= AGAIN_AFTER_S:
            del self._asked_s[next(iter(self._asked_s))]
        if ref.digest not in self._asking and ref.digest not in self._asked_s and len(self._asking) < MAX_EXPECTED:
            self._asking.add(ref.digest)
            self._tasks.start(self._expect(ref))

    async def _expect(self, ref: AdapterRef) -> None:
        try:
            await self._store.prefetch(ref)
            await asyncio.sleep(EXPECTED_S)
        except NotReady as error:
            logger.info("adapter %s is not read ahead: %s", ref.name, error)
        finally:
            self._asking.discard(ref.digest)
            self._asked_s[ref.digest] = self._clock()
