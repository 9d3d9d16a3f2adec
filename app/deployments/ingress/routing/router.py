"""Which adapter a prompt is for, when its sender leaves that to the service.

In: a prompt, who asks, and what the registry's adapters say of themselves. Out: a `Decision`: names in descending
score, all of at least the threshold, at most top_k; none is the base. Rule: only what the caller may use is chosen, and
equal prompts of a tenant are decided equally while the registry stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.config import RoutingConfig
from app.deployments.ingress.routing.candidates import Candidates
from app.deployments.ingress.routing.decision import Decision, Scored
from app.deployments.ingress.schema import RoutingFields
from app.deployments.ingress.tenants import Caller
from app.deployments.links.tasks import Tasks
from app.deployments.registry.entries import DEFAULT_TENANT
from app.deployments.registry.view import RegistryView
from app.engine.errors import NotReady


class TextEmbedder(Protocol):
    """What makes vectors of texts."""

    @property
    def name(self) -> str:
        """For people: which model it is."""
        ...

    async def embed(self, texts: Sequence[str], caller: Caller | None) -> NDArray[np.float32]:
        """[N, H], each of length 1. `caller` pays; None: the service's own work. Raises what computing raises."""
        ...


class Router:
    """One per ingress, on its event loop."""

    def __init__(self, config: RoutingConfig, registry: RegistryView, embedder: TextEmbedder, wait_s: float) -> None:
        """wait_s: how long a request waits for descriptions that are new."""
        self._config = config
        self._embedder = embedder
        self._wait_s = wait_s
        self._candidates = Candidates()
        self._tasks = Tasks()
        self._embedding: dict[tuple[str, ...], asyncio.Task[None]] = {}
        registry.follow(self._candidates.note)

    async def decide(self, text: str, caller: Caller, wishes: RoutingFields | None = None) -> Decision:
        """Raises NotReady while descriptions are being embedded, and what embedding raises."""
        wishes = wishes or RoutingFields()
        threshold = self._config.threshold if wishes.threshold is None else wishes.threshold
        top_k = wishes.top_k or self._config.top_k
        shared = caller.tenant.shared
        owner_ids = list(dict.fromkeys([caller.tenant_id, *sorted(owner for owner, _ in shared), DEFAULT_TENANT]))
        num_candidates = self._candidates.num_of(owner_ids)
        chosen: list[Scored] = []
        if num_candidates:
            await self._ready(tuple(owner_ids))
            vector = (await self._embedder.embed([text], caller))[0]

            def may_use(owner_id: str, name: str) -> bool:
                is_open = owner_id in (caller.tenant_id, DEFAULT_TENANT) or (owner_id, name) in shared
                return is_open and caller.tenant.may_use(name)

            chosen = self._candidates.nearest(vector, owner_ids, may_use, threshold, top_k)
        return Decision(tuple(chosen), num_candidates, self._embedder.name, threshold, top_k)

    async def close(self) -> None:
        await self._tasks.close()

    async def _ready(self, owner_ids: tuple[str, ...]) -> None:
        """Embedding goes on when the request that began it has had enough."""
        task = self._embedding.get(owner_ids)
        if task is None or task.done():
            work = self._candidates.embed_pending(owner_ids, lambda texts: self._embedder.embed(texts, None))
            task = self._embedding[owner_ids] = self._tasks.start(work)
        done, _ = await asyncio.wait([task], timeout=self._wait_s)
        if not done:
            raise NotReady(
                f"the descriptions of adapters are being embedded, which takes more than {self._wait_s:g} s; "
                "send the request again later, or name an adapter",
                retry_after_s=5,
            )
        self._embedding.pop(owner_ids, None)
        task.result()
