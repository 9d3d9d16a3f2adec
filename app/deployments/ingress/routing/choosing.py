"""What model "auto" stands for in one request, within the limits of whoever asks.

In: what a request asks for, and its caller. Out: a `Decision`, and what the request holds of its caller's limits from
then on. Rule: the request is taken once, before anything is computed to choose; the tokens of choosing are reserved
before and settled when it is decided, and those of the answer are reserved behind them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from app.deployments.ingress.routing.decision import Decision
from app.deployments.ingress.routing.router import Router
from app.deployments.ingress.schemas.openai import RoutingFields
from app.deployments.ingress.tenants import Caller
from app.deployments.tenants.limiter import Reservation


class Held(NamedTuple):
    """What a request holds while its adapter is chosen: one request, and the tokens of choosing."""

    request: Reservation
    tokens: Reservation


class Chosen(NamedTuple):
    """What was decided, and what the request goes on to hold."""

    decision: Decision
    held: Reservation


class ChoiceLimits(Protocol):
    """Who keeps limits (`Tenancy`)."""

    async def admit_choice(self, caller: Caller, num_tokens: int) -> Held:
        """Raises LimitReached."""
        ...

    def end_choice(self, held: Held) -> None:
        """It is decided, and took all of its tokens; the request goes on."""
        ...

    def give_up(self, held: Held) -> None:
        """The request has ended. What something else has taken over, or has ended, stays as it is."""
        ...

    def came_to_choose(self, caller: Caller) -> None:
        """Count a request that asks for the choice alone."""
        ...


class Chooser:
    """One per ingress, on its event loop."""

    def __init__(self, router: Router, admission: ChoiceLimits) -> None:
        self._router = router
        self._admission = admission

    async def choose(self, question: str, caller: Caller, wishes: RoutingFields | None = None) -> Decision:
        """For a request that asks for nothing else. Raises LimitReached and what `Router.decide` raises."""
        async with self.choosing(question, caller, wishes) as chosen:
            self._admission.came_to_choose(caller)
            return chosen.decision

    @asynccontextmanager
    async def choosing(
        self, question: str, caller: Caller, wishes: RoutingFields | None = None
    ) -> AsyncIterator[Chosen]:
        """As `choose`; within the block the request is held, which whoever answers it takes over."""
        num_tokens = self._router.num_tokens(question, caller)
        held = await self._admission.admit_choice(caller, num_tokens)
        try:
            decision = await self._router.decide(question, caller, wishes)
            self._admission.end_choice(held)
            yield Chosen(decision, held.request)
        finally:
            self._admission.give_up(held)
