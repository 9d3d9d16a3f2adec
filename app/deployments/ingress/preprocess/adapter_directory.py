"""Lookups about an adapter that a request names: prefetch into the store, activation, own chat text.

The store loads an adapter that is on no device while its request is still tokenized and routed. An adapter is not
prefetched again within `PREFETCH_AGAIN_AFTER_S`, and at most `MAX_PREFETCHES` run at a time; replicas fetch the others
when they need them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from app.deployments.ingress.preprocess.adapter_defaults import AdapterDefaults, adapter_defaults
from app.deployments.placement.placer import Placer
from app.deployments.registry.feed.view import RegistryView
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.adapters.card import AdapterRef, is_activated
from app.engine.adapters.combining.combination import common_text, is_combination, parse_combination
from app.engine.errors import NotReady

logger = logging.getLogger(__name__)

#: An adapter is not prefetched again within this time.
PREFETCH_AGAIN_AFTER_S = 5.0
#: Prefetches at a time.
MAX_PREFETCHES = 256
#: A prefetch occupies its place for at least this long.
MIN_PREFETCH_S = 1.0


class AdapterDirectory:
    """One per ingress, over its copies of the registry and of placement's table. `clock` gives seconds."""

    def __init__(
        self, registry: RegistryView, placer: Placer, store: StoreService[SharedAdapter], clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._placer = placer
        self._store = store
        self._clock = clock
        self._prefetching: set[str] = set()  # digests
        self._prefetched_s: dict[str, float] = {}  # digest -> when, oldest first
        self._tasks = Tasks()

    def prefetch(self, ref: AdapterRef) -> None:
        """Start loading a request's adapter unless it is on a device.

        An activated LoRA is skipped: whether a prompt needs it is known only with its tokens (`needs_adapter`).
        """
        if not self._placer.view.is_resident(ref.digest) and not self._registry.invocation(ref):
            self._start_prefetch(ref)

    def needs_adapter(self, ref: AdapterRef | None, prompts: Sequence[Sequence[int]]) -> list[bool]:
        """For each prompt in token ids, whether its answer needs the adapter (`app.engine.adapters.card`)."""
        if ref is None:
            return [False] * len(prompts)
        invocation = self._registry.invocation(ref)
        if not invocation:
            return [True] * len(prompts)
        is_needed = [is_activated(token_ids, invocation) for token_ids in prompts]
        if any(is_needed) and not self._placer.view.is_resident(ref.digest):
            self._start_prefetch(ref)
        return is_needed

    def text(self, ref: AdapterRef | None) -> str:
        """The adapter's own chat template and special tokens (`AdapterCard.text`); "" for the base model.

        A combination that a request names has its parts'. Raises CombinationError if they differ.
        """
        if ref is None:
            return ""
        entry = self._registry.entry_of(ref)
        if entry is not None or not is_combination(ref.uri):
            return "" if entry is None else entry.text
        parts = [part.ref for part in parse_combination(ref.uri).parts]
        return common_text([part.name for part in parts], list(map(self.text, parts)))

    def defaults(self, ref: AdapterRef | None) -> AdapterDefaults:
        """What a request for this adapter takes where it says nothing. A combination that a request names has no
        defaults of its own but the tokens that end answers, which its parts share.
        """
        entry = None if ref is None else self._registry.entry_of(ref)
        return adapter_defaults(self.text(ref), "" if entry is None else entry.defaults)

    async def close(self) -> None:
        await self._tasks.close()

    def _start_prefetch(self, ref: AdapterRef) -> None:
        now_s = self._clock()
        while self._prefetched_s and now_s - next(iter(self._prefetched_s.values())) >= PREFETCH_AGAIN_AFTER_S:
            del self._prefetched_s[next(iter(self._prefetched_s))]
        if (
            ref.digest not in self._prefetching
            and ref.digest not in self._prefetched_s
            and len(self._prefetching) < MAX_PREFETCHES
        ):
            self._prefetching.add(ref.digest)
            self._tasks.start(self._prefetch(ref))

    async def _prefetch(self, ref: AdapterRef) -> None:
        try:
            await self._store.prefetch(ref)
            await asyncio.sleep(MIN_PREFETCH_S)
        except NotReady as error:
            logger.info("cannot prefetch adapter %s: %s", ref.name, error)
        finally:
            self._prefetching.discard(ref.digest)
            self._prefetched_s[ref.digest] = self._clock()
