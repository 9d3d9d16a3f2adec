"""Semantic router: chooses adapters for model "auto" by the cosine of the prompt and the adapters' descriptions.

Only adapters that the caller may use are chosen. Equal prompts of a tenant get equal decisions while the registry does
not change. A decision is within the caller's limits: the request itself and the tokens of choosing are reserved before
anything is computed, and those of the answer afterwards.
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

    @property
    def has_price(self) -> bool:
        """Whether a token costs what one of the base model's does. Limits on tokens apply in any case."""
        ...

    async def tokenize(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The token ids of each text, cut to the embedder's length."""
        ...

    async def embed(self, token_ids: Sequence[Sequence[int]], caller: Principal | None) -> NDArray[np.float32]:
        """Unit vectors [N, H] of texts. `caller`: whose requests they are; None: the service's own. Raises the engine's
        errors."""
        ...


class Selection(NamedTuple):
    """A decision, and the request's reservation of its caller's limits."""

    decision: Decision
    reservation: Reservation


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

    async def choose(self, text: str, caller: Principal, options: RoutingFields | None = None) -> Decision:
        """Choose adapters for a request that generates nothing. Raises as `selection` does."""
        async with self.selection(text, caller, options) as selection:
            self._accounting.count_routed_request(caller)
            return selection.decision

    @asynccontextmanager
    async def selection(
        self, text: str, caller: Principal, options: RoutingFields | None = None
    ) -> AsyncIterator[Selection]:
        """The adapters for a text, and the reservation that the answer takes over within the block.

        Raises NotReady while descriptions are embedded, LimitError if the caller's limits do not suffice, also to embed
        its own descriptions, and the embedder's errors.
        """
        num_candidates = self._num_usable(_visible(caller), caller.tenant)
        token_ids = await self._in_time(self._embedder.tokenize([text])) if num_candidates else []
        num_tokens = sum(map(len, token_ids))
        quota = await self._accounting.admit_routing(caller, num_tokens, has_price=self._embedder.has_price)
        try:
            decision = await self._decide(token_ids, num_candidates, caller, options or RoutingFields())
            self._accounting.finish_routing(quota)
            yield Selection(decision, quota.request)
        finally:
            self._accounting.release(quota, is_repeated=caller.is_batch)

    def has_score_head(self, decision: Decision) -> bool:
        """Whether any chosen adapter is known to generate no text, which an adapter that is not read yet is not."""
        entries = [self._registry.adapter(one.name, one.owner_id) for one in decision.chosen]
        return any(entry is not None and entry.has_score_head for entry in entries)

    async def close(self) -> None:
        await self._tasks.close()

    async def _decide(
        self, token_ids: Sequence[Sequence[int]], num_candidates: int, caller: Principal, options: RoutingFields
    ) -> Decision:
        """`token_ids`: of the one text, or empty without candidates."""
        threshold = self._config.threshold if options.threshold is None else options.threshold
        top_k = options.top_k or self._config.top_k
        chosen: list[ScoredAdapter] = []
        if token_ids:
            visible = _visible(caller)
            await self._ready(visible, caller.tenant_id)
            (vector,) = await self._in_time(self._embedder.embed(token_ids, caller))
            chosen = self._candidates.nearest(vector, visible, partial(self._is_accessible, caller), threshold, top_k)
        return Decision(tuple(chosen), num_candidates, self._embedder.name, threshold, top_k)

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
        token_ids = await self._embedder.tokenize(texts)
        num_tokens = sum(map(len, token_ids))
        await self._accounting.charge_tokens(owner, num_tokens, has_price=self._embedder.has_price)
        return await self._embedder.embed(token_ids, owner)


def _num_permitted(tenant: Tenant, owner_id: str, names: Set[str]) -> int:
    return sum(tenant.may_use(model_id(owner_id, name)) for name in names)


def _visible(caller: Principal) -> Visible:
    """Owners in order of precedence: the caller, those who share names with it, then the default tenant."""
    shared: dict[str, frozenset[str]] = {}
    for owner_id, name in sorted(caller.tenant.shared):
        shared[owner_id] = shared.get(owner_id, frozenset()) | {name}
    return {caller.tenant_id: None, **shared, DEFAULT_TENANT: None, caller.tenant_id: None}
