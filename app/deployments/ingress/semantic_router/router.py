"""Which adapter a prompt is for, when its sender leaves that to the service.

In: a prompt, who asks, and what the registry's adapters say of themselves. Out: a `Decision`: names in descending
score, all of at least the threshold, at most top_k; none is the base. Rule: only what the caller may use is chosen, and
equal prompts of a tenant are decided equally while the registry stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from app.config import SemanticRouterConfig
from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import RoutingFields
from app.deployments.ingress.semantic_router.candidates import Candidates, Visible
from app.deployments.ingress.semantic_router.decision import Decision, ScoredAdapter
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.models import DEFAULT_TENANT
from app.deployments.rpc.background_tasks import SingleFlight, Tasks
from app.deployments.tenancy.models import Tenant
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.errors import NotReady


class TextEmbedder(Protocol):
    """What makes vectors of texts."""

    @property
    def name(self) -> str:
        """For people: which model it is."""
        ...

    async def embed(self, texts: Sequence[str], caller: Principal | None) -> NDArray[np.float32]:
        """[N, H], each of length 1. `caller` pays; None: the service's own work. Raises what computing raises."""
        ...

    def num_tokens(self, text: str) -> int:
        """What a tenant pays for one text: the tokens that its engine computes for it."""
        ...


class Router:
    """One per ingress, on its event loop."""

    def __init__(
        self, config: SemanticRouterConfig, registry: RegistryView, embedder: TextEmbedder, wait_s: float
    ) -> None:
        """wait_s: how long a request waits for descriptions that are new."""
        self._config = config
        self._registry = registry
        self._embedder = embedder
        self._wait_s = wait_s
        self._candidates = Candidates()
        self._tasks = Tasks()
        self._embedding: SingleFlight[tuple[str, frozenset[str] | None], None] = SingleFlight(self._tasks)
        registry.follow(self._candidates.note)

    async def decide(self, text: str, caller: Principal, options: RoutingFields | None = None) -> Decision:
        """Raises NotReady while descriptions are being embedded, and what embedding raises."""
        options = options or RoutingFields()
        threshold = self._config.threshold if options.threshold is None else options.threshold
        top_k = options.top_k or self._config.top_k
        visible = _visible(caller)
        num_candidates = self._num_usable(visible, caller.tenant)
        chosen: list[ScoredAdapter] = []
        if num_candidates:
            await self._ready(visible)
            vector = (await self._embedder.embed([text], caller))[0]
            chosen = self._candidates.nearest(vector, visible, partial(self._is_accessible, caller), threshold, top_k)
        return Decision(tuple(chosen), num_candidates, self._embedder.name, threshold, top_k)

    def num_tokens(self, text: str, caller: Principal) -> int:
        """What deciding will take of the caller's tokens; without candidates nothing is computed."""
        return self._embedder.num_tokens(text) if self._num_usable(_visible(caller), caller.tenant) else 0

    async def close(self) -> None:
        await self._tasks.close()

    def _num_usable(self, visible: Visible, tenant: Tenant) -> int:
        """Candidates that the tenant sees, may use, and gets under their names."""
        number = 0
        before: list[Set[str]] = []  # the names of the owners that are asked first
        for owner_id, names in visible.items():
            hidden = {name for others in before for name in self._candidates.subset(owner_id, others)}
            number += self._num_allowed(owner_id, names, tenant)
            number -= sum(map(tenant.may_use, hidden if names is None else hidden & names))
            held = self._registry.names(owner_id)
            before.append(held if names is None else held & names)
        return number

    def _num_allowed(self, owner_id: str, names: frozenset[str] | None, tenant: Tenant) -> int:
        """An owner's candidates of these names (None: all of them) that the tenant may use."""
        if names is not None:
            return sum(map(tenant.may_use, self._candidates.subset(owner_id, names)))
        listed = self._candidates.subset(owner_id, tenant.model_ids) if tenant.model_mode else set()
        return (
            len(listed)
            if tenant.model_mode == "allow_list"
            else self._candidates.num_candidates(owner_id) - len(listed)
        )

    def _is_accessible(self, caller: Principal, owner_id: str, name: str) -> bool:
        """Whether it is this owner's adapter that the caller gets under the name, and not one of an owner before it."""
        having = (owner for owner in caller.owners(name) if self._registry.find(name, owner) is not None)
        return next(having, None) == owner_id

    async def _ready(self, visible: Visible) -> None:
        """Each owner's descriptions are embedded once however many ask, and on when those have had enough."""
        tasks = [self._embed(*each) for each in visible.items() if self._candidates.is_pending(*each)]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self._wait_s)
        if late:
            raise NotReady(
                f"the descriptions of adapters are being embedded, which takes more than {self._wait_s:g} s; "
                "send the request again later, or name an adapter",
                retry_after_s=5,
            )
        for task in tasks:
            task.result()

    def _embed(self, owner_id: str, names: frozenset[str] | None) -> asyncio.Task[None]:
        return self._embedding.task(
            (owner_id, names),
            lambda: self._candidates.embed_pending(owner_id, names, lambda texts: self._embedder.embed(texts, None)),
        )


def _visible(caller: Principal) -> Visible:
    """The caller's own adapters before those that others share with it by name, and then everybody's."""
    shared: dict[str, frozenset[str]] = {}
    for owner_id, name in sorted(caller.tenant.shared):
        shared[owner_id] = shared.get(owner_id, frozenset()) | {name}
    return {caller.tenant_id: None, **shared, DEFAULT_TENANT: None, caller.tenant_id: None}


class Selection(NamedTuple):
    """What was decided, and what the request goes on to hold."""

    decision: Decision
    held: Reservation


class AdapterSelector:
    """One per ingress, on its event loop."""

    def __init__(self, router: Router, tenancy: RequestAccounting) -> None:
        self._router = router
        self._tenancy = tenancy

    async def choose(self, question: str, caller: Principal, options: RoutingFields | None = None) -> Decision:
        """For a request that asks for nothing else. Raises LimitReached and what `Router.decide` raises."""
        async with self.selection(question, caller, options) as chosen:
            self._tenancy.came_to_choose(caller)
            return chosen.decision

    @asynccontextmanager
    async def selection(
        self, question: str, caller: Principal, options: RoutingFields | None = None
    ) -> AsyncIterator[Selection]:
        """As `choose_replica`; within the block the request is held, which whoever answers it takes over."""
        num_tokens = self._router.num_tokens(question, caller)
        held = await self._tenancy.admit_choice(caller, num_tokens)
        try:
            decision = await self._router.decide(question, caller, options)
            self._tenancy.end_choice(held)
            yield Selection(decision, held.request)
        finally:
            self._tenancy.give_up(held)
