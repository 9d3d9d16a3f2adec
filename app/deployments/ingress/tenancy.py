"""What an ingress does about tenants: it knows their keys, admits their requests within their limits, and counts them.

In: the owner's table, requests that are ready to run, and jobs that have ended. Out: a `TenantView`, read from this
process's memory; reservations; batches for the ledger. Rule: every job is admitted, and counted, once before it runs,
and settled once when it has ended, however it ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from app.deployments.ingress.job import Job
from app.deployments.ingress.tenants import Caller
from app.deployments.links.published import Changes, Version
from app.deployments.links.watched import Follower
from app.deployments.tenants.counting import Counting
from app.deployments.tenants.entries import TenantKey, TenantLimits, TenantRow
from app.deployments.tenants.journal import Journal
from app.deployments.tenants.limiter import Limiter, Reservation
from app.deployments.tenants.limits import Meter, MeterKind, Need, needs_of
from app.deployments.tenants.metering import Metering
from app.deployments.tenants.prices import Prices, paid_models
from app.deployments.tenants.service import TenantsService
from app.deployments.tenants.view import TenantView
from app.engine.adapters.card import AdapterRef
from app.engine.errors import InvalidRequest, NotFound, NotReady
from app.engine.request import GenerateRequest, Usage

logger = logging.getLogger(__name__)

#: How often it is told when keys were last used.
USE_INTERVAL_S = 60.0
_NO_LIMITS = TenantLimits()


class WatchedTenants(Follower[Changes[TenantKey, TenantRow]]):
    """The owner's table, copied by its changes into `view`. `complete` is set when there is nothing to catch up."""

    def __init__(self, owner: TenantsService, watcher_id: str) -> None:
        super().__init__(owner.watch, watcher_id)
        self.view = TenantView()
        self.complete = asyncio.Event()

    def _take(self, version: Version, news: Changes[TenantKey, TenantRow]) -> None:
        self._held = version
        self.view.take(news)
        if news.is_last:
            self.complete.set()


class Held(NamedTuple):
    """What a request holds while its adapter is chosen: one request, and the tokens of choosing."""

    request: Reservation
    tokens: Reservation


class Rates(NamedTuple):
    """What a request's tokens cost, and the base model's name, under which limits hold for all of them."""

    prices: Prices
    base_name: str


class Tenancy:
    """One per ingress. `clock` gives Unix time, `monotonic` seconds that no change of the time moves; `holder` is this
    process's id, which no other process ever has."""

    def __init__(
        self,
        view: TenantView,
        owner: TenantsService,
        rates: Rates,
        holder: str,
        clock: Callable[[], float],
        journal: Journal | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = view
        self.owner = owner
        self.clock = clock
        self.limiter = Limiter(owner.lend, holder, monotonic)
        self.metering = Metering(owner.record, holder, journal)
        self.counting = Counting(self.metering, rates.prices, rates.base_name, clock)
        self._rates = rates
        self._used_s: dict[str, float] = {}

    async def admit(
        self, caller: Caller, requests: Sequence[GenerateRequest], held: Reservation | None = None
    ) -> Reservation:
        """Reserve what these sequences may take at most, and count that a request came; of a batch that is counted when
        the line is answered. Raises LimitReached.

        `held`: what the request holds already, because its adapter was chosen; the reservation takes it over.
        """
        reservation = Reservation({}, settled=True)
        if caller.tenant.limits != _NO_LIMITS:
            needs = [self._need(request) for request in requests]
            taken = needs_of(caller.tenant, self._rates.base_name, needs)
            reservation = await self.limiter.reserve(caller.tenant, taken, held)
        if not caller.is_batch:  # a line of a batch may come again and again before it is answered
            self.counting.came(requests[0])
        return reservation

    async def admit_choice(self, caller: Caller, num_tokens: int) -> Held:
        """Reserve one request, and the tokens of choosing its adapter. Raises LimitReached."""
        reservation = Reservation({}, settled=True)
        if caller.tenant.limits != _NO_LIMITS:
            base_name = self._rates.base_name
            need = Need((base_name,), num_tokens, self._rates.prices.at_most((base_name,), num_tokens, 0))
            reservation = await self.limiter.reserve(caller.tenant, needs_of(caller.tenant, base_name, [need]))
        return Held(*reservation.parted(("tokens", "spend")))

    @asynccontextmanager
    async def one_request(self, caller: Caller, ref: AdapterRef | None) -> AsyncIterator[None]:
        """Reserve one request of a model that no engine is asked for, while the block runs. Raises LimitReached.

        It has no tokens and costs nothing, so only what counts requests may refuse it. What the block refuses as
        malformed takes nothing.
        """
        reservation = Reservation({}, settled=True)
        if caller.tenant.limits != _NO_LIMITS:
            base_name = self._rates.base_name
            needs = needs_of(caller.tenant, base_name, [Need(paid_models(ref, base_name), 0, 0)])
            counted = {meter: amount for meter, amount in needs.items() if amount}
            reservation = await self.limiter.reserve(caller.tenant, counted)
        try:
            yield
        except (InvalidRequest, NotFound):
            self.limiter.settle(reservation, dict.fromkeys(reservation.units, 0))
            raise
        finally:
            self.limiter.settle(reservation, {})

    def end_choice(self, held: Held) -> None:
        """It is decided: all of its tokens are used."""
        self.limiter.settle(held.tokens, {})

    def give_up(self, held: Held) -> None:
        """The request has ended: settle what nothing else has taken over. Tokens are given back: none were computed."""
        self.limiter.settle(held.tokens, dict.fromkeys(held.tokens.units, 0))
        self.limiter.settle(held.request, {})

    def came_to_choose(self, caller: Caller) -> None:
        """`Counting.came_to_choose`."""
        self.counting.came_to_choose(caller.tenant_id, caller.key_id)

    def end(self, job: Job, *, is_cut: bool) -> None:
        """A job has ended: settle what it reserved. What its sequences took is counted where they were computed.

        `is_cut`: because its client left. Then each prompt is taken, also one of which nothing was heard yet: whoever
        leaves before the first token would have prompts computed without limit.
        """
        self._settle(job, is_cut=is_cut)

    def comes_again(self, job: Job) -> None:
        """A batch's job has come to nothing for now: it is no request yet."""
        self._settle(job, is_request=False)

    def _settle(self, job: Job, *, is_cut: bool = False, is_request: bool = True) -> None:
        if job.reservation.settled:
            return
        taken: list[Need] = []
        for request, usage in zip(job.requests, job.usages, strict=True):
            models = self._models(request)
            used = usage or Usage(len(request.token_ids) if is_cut else 0, 0, 0)
            cost = self._rates.prices.of(models, used)
            taken.append(Need(models, used.prompt_tokens + used.completion_tokens, cost))
        actual = needs_of(job.caller.tenant, self._rates.base_name, taken)
        if not is_request:
            actual |= {meter: 0 for meter in actual if meter.kind in ("requests", "day")}
        self.limiter.settle(job.reservation, actual)

    def headers(self, caller: Caller) -> dict[str, str]:
        """What is left of the tenant's limits per minute, in OpenAI's headers; none where there is no limit."""
        if not caller.tenant.limits.rates:
            return {}
        headers: dict[str, str] = {}
        kinds: tuple[MeterKind, ...] = ("requests", "tokens")
        for kind in kinds:
            allowance = self.limiter.allowance(Meter(caller.tenant_id, kind, self._rates.base_name))
            if allowance is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(allowance.limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(allowance.remaining)
                headers[f"x-ratelimit-reset-{kind}"] = duration(allowance.reset_s)
        return headers

    async def close(self) -> None:
        """Write down what was used."""
        await self.metering.close()
        await self.limiter.close()

    def _need(self, request: GenerateRequest) -> Need:
        models, num_prompt = self._models(request), len(request.token_ids)
        max_tokens = request.sampling.max_tokens if request.pooling is None else 0
        return Need(models, num_prompt + max_tokens, self._rates.prices.at_most(models, num_prompt, max_tokens))

    def _models(self, request: GenerateRequest) -> tuple[str, ...]:
        return paid_models(request.asked_for, self._rates.base_name)

    def note_use(self, key_id: str, now_s: float) -> None:
        """A key has let a request in."""
        self._used_s[key_id] = now_s

    async def keep_telling(self) -> None:
        """`tell` once a minute, until cancelled."""
        while True:
            await asyncio.sleep(USE_INTERVAL_S)
            await self.tell()

    async def tell(self) -> None:
        """Say when keys were used since the last time. What the owner does not hear is told with the next."""
        used_s, self._used_s = self._used_s, {}
        if not used_s:
            return
        try:
            await self.owner.note_use(used_s)
        except NotReady as error:
            self._used_s = used_s | self._used_s
            logger.info("the last use of %d keys is not written down yet: %s", len(used_s), error)


def duration(seconds: float) -> str:
    """As Go writes it, and OpenAI: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    whole = math.ceil(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{whole % 60}s"
