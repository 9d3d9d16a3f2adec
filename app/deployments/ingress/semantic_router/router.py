"""Semantic router: chooses adapters for model "auto" by the cosine of the prompt and the adapters' descriptions.

Only adapters that the caller may use are chosen. Equal prompts of a tenant get equal decisions while the registry does
not change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence, Set
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.config import SemanticRouterConfig
from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import RoutingFields
from app.deployments.ingress.semantic_router.candidates import MAX_TOGETHER, Candidates, Visible
from app.deployments.ingress.semantic_router.decision import Decision, ScoredAdapter
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.models import DEFAULT_TENANT, model_id
from app.deployments.rpc.background_tasks import SingleFlight, Tasks
from app.deployments.tenancy.models import NO_LIMITS, Tenant
from app.deployments.tenancy.quota.limits import LimitError
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.errors import NotReady

_T = TypeVar("_T")


class TextEmbedder(Protocol):
    """Embeds texts for the router."""

    @property
    def name(self) -> str:
        """The model's name, for responses."""
        ...

    async def embed(self, texts: Sequence[str], caller: Principal | None) -> NDArray[np.float32]:
        """Unit vectors [N, H]. `caller` is charged; None: the service's own work. Raises the engine's errors."""
        ...

    @property
    def has_price(self) -> bool:
        """Whether a token costs what one of the base model's does. Limits on tokens apply in any case."""
        ...

    async def num_tokens(self, texts: Sequence[str]) -> int:
        """The number of tokens that embedding them computes."""
        ...


class SemanticRouter:
    """Chooses adapters; one per ingress, on its event loop."""

    def __init__(
        self,
        config: SemanticRouterConfig,
        registry: RegistryView,
        embedder: TextEmbedder,
        wait_s: float,
        accounting: RequestAccounting,
    ) -> None:
        """`wait_s`: how long a request waits until new descriptions are embedded."""
        self._accounting = accounting
        self._config = config
        self._registry = registry
        self._embedder = embedder
        self._wait_s = wait_s
        self._candidates = Candidates()
        self._tasks = Tasks()
        self._embedding: SingleFlight[tuple[str, frozenset[str] | None], None] = SingleFlight(self._tasks)
        registry.follow(self._candidates.note)

    async def decide(self, text: str, caller: Principal, options: RoutingFields | None = None) -> Decision:
        """Choose adapters for a text.

        Raises NotReady while descriptions are embedded, LimitError if the caller's limits do not suffice to embed its
        own, and the embedder's errors.
        """
        options = options or RoutingFields()
        threshold = self._config.threshold if options.threshold is None else options.threshold
        top_k = options.top_k or self._config.top_k
        visible = _visible(caller)
        num_candidates = self._num_usable(visible, caller.tenant)
        chosen: list[ScoredAdapter] = []
        if num_candidates:
            await self._ready(visible, caller.tenant_id)
            vector = (await self._in_time(self._embedder.embed([text], caller)))[0]
            chosen = self._candidates.nearest(vector, visible, partial(self._is_accessible, caller), threshold, top_k)
        return Decision(tuple(chosen), num_candidates, self._embedder.name, threshold, top_k)

    def has_score_head(self, decision: Decision) -> bool:
        """Whether any chosen adapter is known to generate no text, which an adapter that is not read yet is not."""
        entries = [self._registry.adapter(one.name, one.owner_id) for one in decision.chosen]
        return any(entry is not None and entry.has_score_head for entry in entries)

    async def num_tokens(self, text: str, caller: Principal) -> int:
        """The tokens that a decision computes for the caller: none without candidates. Raises NotReady."""
        if not self._num_usable(_visible(caller), caller.tenant):
            return 0
        return await self._in_time(self._embedder.num_tokens([text]))

    @property
    def has_price(self) -> bool:
        """See `TextEmbedder.has_price`."""
        return self._embedder.has_price

    async def close(self) -> None:
        await self._tasks.close()

    def _num_usable(self, visible: Visible, tenant: Tenant) -> int:
        """The number of candidates that the tenant sees, may use, and reaches by name."""
        number = 0
        before: list[tuple[str, Set[str]]] = []  # names of the owners with precedence, which hide the same name here
        for owner_id, names in visible.items():
            hidden = {
                name
                for other_id, others in before
                for name in self._candidates.subset(owner_id, others)
                if tenant.may_use(model_id(other_id, name))
            }
            number += self._num_allowed(owner_id, names, tenant)
            number -= _num_permitted(tenant, owner_id, hidden if names is None else hidden & names)
            registered = self._registry.names(owner_id)
            before.append((owner_id, registered if names is None else registered & names))
        return number

    def _num_allowed(self, owner_id: str, names: frozenset[str] | None, tenant: Tenant) -> int:
        """The number of an owner's candidates of these names (None: all) that the tenant may use."""
        if names is not None:
            return _num_permitted(tenant, owner_id, self._candidates.subset(owner_id, names))
        listed = self._candidates.subset(owner_id, tenant.listed_names(owner_id)) if tenant.model_mode else set()
        return len(listed) if tenant.model_mode == "allow_list" else self._candidates.count(owner_id) - len(listed)

    def _is_accessible(self, caller: Principal, owner_id: str, name: str) -> bool:
        """Whether the name resolves to this owner's adapter for the caller, not to one with precedence."""
        owners = (owner for owner in caller.owners(name) if self._registry.find(name, owner) is not None)
        return next(owners, None) == owner_id

    async def _ready(self, visible: Visible, tenant_id: str) -> None:
        """Wait until the visible descriptions are embedded. Callers share the work, which outlives their wait.

        A tenant with exhausted limits keeps its own requests waiting. Others do not choose its new adapters until then.
        """
        pending = [each for each in visible.items() if self._candidates.is_pending(*each)]
        if not pending:
            return
        tasks = {owner_id: self._embed(owner_id, names) for owner_id, names in pending}
        _, late = await asyncio.wait(tasks.values(), timeout=self._wait_s)
        if late:
            raise NotReady(
                f"the descriptions of adapters are being embedded, which takes longer than {self._wait_s:g} s; "
                "send the request again later, or name an adapter",
                retry_after_s=5,
            )
        for owner_id, task in tasks.items():
            if not isinstance(task.exception(), LimitError) or owner_id == tenant_id:
                task.result()

    async def _in_time(self, work: Awaitable[_T]) -> _T:
        try:
            return await asyncio.wait_for(work, self._wait_s)
        except TimeoutError:
            raise NotReady(
                f"the model that chooses adapters did not answer within {self._wait_s:g} s; send the request again "
                "later, or name an adapter",
                retry_after_s=5,
            ) from None

    def _embed(self, owner_id: str, names: frozenset[str] | None) -> asyncio.Task[None]:
        embed = partial(self._embed_for, owner_id)
        is_limited = self._accounting.owner(owner_id).tenant.limits != NO_LIMITS  # then as many as its limits allow
        together = 1 if is_limited else MAX_TOGETHER
        return self._embedding.task(
            (owner_id, names), lambda: self._candidates.embed_pending(owner_id, names, embed, together)
        )

    async def _embed_for(self, owner_id: str, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embed descriptions at their owner's cost. Raises LimitError."""
        owner = self._accounting.owner(owner_id)
        num_tokens = await self._embedder.num_tokens(texts)
        await self._accounting.charge_tokens(owner, num_tokens, has_price=self._embedder.has_price)
        return await self._embedder.embed(texts, owner)


def _num_permitted(tenant: Tenant, owner_id: str, names: Set[str]) -> int:
    return sum(tenant.may_use(model_id(owner_id, name)) for name in names)


def _visible(caller: Principal) -> Visible:
    """Owners in order of precedence: the caller, those who share names with it, then the default tenant."""
    shared: dict[str, frozenset[str]] = {}
    for owner_id, name in sorted(caller.tenant.shared):
        shared[owner_id] = shared.get(owner_id, frozenset()) | {name}
    return {caller.tenant_id: None, **shared, DEFAULT_TENANT: None, caller.tenant_id: None}


class Selection(NamedTuple):
    """A decision, and the request's reservation of its caller's limits."""

    decision: Decision
    reservation: Reservation


class AdapterSelector:
    """Applies the router within the caller's limits; one per ingress.

    The request itself and the tokens of choosing are reserved before anything is computed. The tokens are settled when
    the decision is made; those of the answer are reserved afterwards.
    """

    def __init__(self, router: SemanticRouter, accounting: RequestAccounting) -> None:
        self._router = router
        self._accounting = accounting

    def has_score_head(self, decision: Decision) -> bool:
        """See `SemanticRouter.has_score_head`."""
        return self._router.has_score_head(decision)

    async def choose(self, question: str, caller: Principal, options: RoutingFields | None = None) -> Decision:
        """Decide for a request that generates nothing. Raises LimitError and what `SemanticRouter.decide` raises."""
        async with self.selection(question, caller, options) as selection:
            self._accounting.count_routed_request(caller)
            return selection.decision

    @asynccontextmanager
    async def selection(
        self, question: str, caller: Principal, options: RoutingFields | None = None
    ) -> AsyncIterator[Selection]:
        """The decision, and the reservation that the answer takes over within the block. Raises as `choose` does."""
        num_tokens = await self._router.num_tokens(question, caller)
        choice = await self._accounting.admit_routing(caller, num_tokens, has_price=self._router.has_price)
        try:
            decision = await self._router.decide(question, caller, options)
            self._accounting.finish_routing(choice)
            yield Selection(decision, choice.request)
        finally:
            self._accounting.release(choice)
