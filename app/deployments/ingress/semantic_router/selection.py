"""What model "auto" stands for in one request, within the limits of whoever asks.

In: what a request asks for, and its caller. Out: a `Decision`, and what the request holds of its caller's limits from
then on. Rule: the request is taken once, before anything is computed to choose; the tokens of choosing are reserved
before and settled when it is decided, and those of the answer are reserved behind them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import RoutingFields
from app.deployments.ingress.semantic_router.decision import Decision
from app.deployments.ingress.semantic_router.router import Router
from app.deployments.tenancy.quota.rate_limiter import Reservation


class Selection(NamedTuple):
    """What was decided, and what the request goes on to hold."""

    decision: Decision
    held: Reservation


class AdapterSelector:
    """One per ingress, on its event loop."""

    def __init__(self, router: Router, tenancy: RequestAccounting) -> None:
        self._router = router
        self._tenancy = tenancy

    async def choose(self, question: str, caller: Principal, wishes: RoutingFields | None = None) -> Decision:
        """For a request that asks for nothing else. Raises LimitError and what `Router.decide` raises."""
        async with self.choosing(question, caller, wishes) as chosen:
            self._tenancy.came_to_choose(caller)
            return chosen.decision

    @asynccontextmanager
    async def choosing(
        self, question: str, caller: Principal, wishes: RoutingFields | None = None
    ) -> AsyncIterator[Selection]:
        """As `choose_replica`; within the block the request is held, which whoever answers it takes over."""
        num_tokens = self._router.num_tokens(question, caller)
        held = await self._tenancy.admit_choice(caller, num_tokens)
        try:
            decision = await self._router.decide(question, caller, wishes)
            self._tenancy.end_choice(held)
            yield Selection(decision, held.request)
        finally:
            self._tenancy.give_up(held)
