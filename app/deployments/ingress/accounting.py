"""What an ingress does about tenants: it knows their keys, admits their requests within their limits, and counts them.

In: the owner's table, requests that are ready to run, and jobs that have ended. Out: a `TenantMirror`, read from this
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

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.principal import Principal
from app.deployments.rpc.long_poll_client import LongPollClient
from app.deployments.rpc.long_poll_host import Changes, Version
from app.deployments.tenancy.auth.tenant_mirror import TenantMirror
from app.deployments.tenancy.models import TenantKey, TenantLimits, TenantRow
from app.deployments.tenancy.quota.limits import Cost, LimitKey, MeterKind, request_costs
from app.deployments.tenancy.quota.rate_limiter import RateLimiter, Reservation
from app.deployments.tenancy.service import TenantsService
from app.deployments.tenancy.usage.flusher import UsageFlusher
from app.deployments.tenancy.usage.prices import Prices, paid_models
from app.deployments.tenancy.usage.recorder import UsageRecorder
from app.deployments.tenancy.usage.wal import UsageWal
from app.engine.adapters.card import AdapterRef
from app.engine.errors import InvalidRequest, NotFound, NotReady
from app.engine.request import GenerateRequest, Usage

logger = logging.getLogger(__name__)

#: How often it is told when keys were last used.
USE_INTERVAL_S = 60.0
_NO_LIMITS = TenantLimits()


class TenantFeed(LongPollClient[Changes[TenantKey, TenantRow]]):
    """The owner's table, copied by its changes into `view`. `complete` is set when there is nothing to catch up."""

    def __init__(self, owner: TenantsService, watcher_id: str) -> None:
        super().__init__(owner.watch, watcher_id)
        self.view = TenantMirror()
        self.complete = asyncio.Event()

    def _take(self, version: Version, news: Changes[TenantKey, TenantRow]) -> None:
        self._held = version
        self.view.take(news)
        if news.is_last:
            self.complete.set()


class ReservedQuota(NamedTuple):
    """What a request holds while its adapter is chosen: one request, and the tokens of choosing."""

    request: Reservation
    tokens: Reservation


class PricingContext(NamedTuple):
    """What a request's tokens cost, and the base model's name, under which limits hold for all of them."""

    prices: Prices
    base_name: str


class RequestAccounting:
    """One per ingress. `clock` gives Unix time, `monotonic` seconds that no change of the time moves; `holder` is this
    process's id, which no other process ever has."""

    def __init__(
        self,
        view: TenantMirror,
        owner: TenantsService,
        rates: PricingContext,
        holder: str,
        clock: Callable[[], float],
        journal: UsageWal | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = view
        self.owner = owner
        self.clock = clock
        self.limiter = RateLimiter(owner.lease, holder, monotonic)
        self.metering = UsageFlusher(owner.record, holder, journal)
        self.counting = UsageRecorder(self.metering, rates.prices, rates.base_name, clock)
        self._rates = rates
        self._used_s: dict[str, float] = {}

    async def admit(
        self, caller: Principal, requests: Sequence[GenerateRequest], held: Reservation | None = None
    ) -> Reservation:
        """Reserve what these sequences may take at most, and count that a request came; of a batch that is counted when
        the line is answered. Raises LimitError.

        `get_object`: what the request holds already, because its adapter was chosen; the reservation takes it over.
        """
        reservation = Reservation({}, is_settled=True)
        if caller.tenant.limits != _NO_LIMITS:
            needs = [self._need(request) for request in requests]
            taken = request_costs(caller.tenant, self._rates.base_name, needs)
            reservation = await self.limiter.reserve(caller.tenant, taken, held)
        if not caller.is_batch:  # a line of a batch may come again and again before it is answered
            self.counting.record_request(requests[0])
        return reservation

    async def admit_choice(self, caller: Principal, num_tokens: int) -> ReservedQuota:
        """Reserve one request, and the tokens of choosing its adapter. Raises LimitError."""
        reservation = Reservation({}, is_settled=True)
        if caller.tenant.limits != _NO_LIMITS:
            base_name = self._rates.base_name
            need = Cost((base_name,), num_tokens, self._rates.prices.at_most((base_name,), num_tokens, 0))
            reservation = await self.limiter.reserve(caller.tenant, request_costs(caller.tenant, base_name, [need]))
        return ReservedQuota(*reservation.split(("tokens", "spend")))

    @asynccontextmanager
    async def one_request(self, caller: Principal, ref: AdapterRef | None) -> AsyncIterator[None]:
        """Reserve one request of a model that no engine is asked for, while the block runs. Raises LimitError.

        It has no tokens and costs nothing, so only what counts requests may refuse it. What the block refuses as
        malformed takes nothing.
        """
        reservation = Reservation({}, is_settled=True)
        if caller.tenant.limits != _NO_LIMITS:
            base_name = self._rates.base_name
            needs = request_costs(caller.tenant, base_name, [Cost(paid_models(ref, base_name), 0, 0)])
            counted = {meter: amount for meter, amount in needs.items() if amount}
            reservation = await self.limiter.reserve(caller.tenant, counted)
        try:
            yield
        except (InvalidRequest, NotFound):
            self.limiter.settle(reservation, dict.fromkeys(reservation.units, 0))
            raise
        finally:
            self.limiter.settle(reservation, {})

    def end_choice(self, held: ReservedQuota) -> None:
        """It is decided: all of its tokens are used."""
        self.limiter.settle(held.tokens, {})

    def give_up(self, held: ReservedQuota) -> None:
        """The request has ended: settle what nothing else has taken over. Tokens are given back: none were computed."""
        self.limiter.settle(held.tokens, dict.fromkeys(held.tokens.units, 0))
        self.limiter.settle(held.request, {})

    def came_to_choose(self, caller: Principal) -> None:
        """`UsageRecorder.record_routing_request`."""
        self.counting.record_routing_request(caller.tenant_id, caller.key_id)

    def end(self, job: GenerationTask, *, is_cut: bool) -> None:
        """A job has ended: settle what it reserved. What its sequences took is counted where they were computed.

        `is_cut`: because its client left. Then each prompt is taken, also one of which nothing was heard yet: whoever
        leaves before the first token would have prompts computed without limit.
        """
        self._settle(job, is_cut=is_cut)

    def comes_again(self, job: GenerationTask) -> None:
        """A batch's job has come to nothing for now: it is no request yet."""
        self._settle(job, is_request=False)

    def _settle(self, job: GenerationTask, *, is_cut: bool = False, is_request: bool = True) -> None:
        if job.reservation.is_settled:
            return
        taken: list[Cost] = []
        for request, usage in zip(job.requests, job.usages, strict=True):
            models = self._models(request)
            used = usage or Usage(len(request.token_ids) if is_cut else 0, 0, 0)
            cost = self._rates.prices.of(models, used)
            taken.append(Cost(models, used.prompt_tokens + used.completion_tokens, cost))
        actual = request_costs(job.caller.tenant, self._rates.base_name, taken)
        if not is_request:
            actual |= {meter: 0 for meter in actual if meter.kind in ("requests", "day")}
        self.limiter.settle(job.reservation, actual)

    def headers(self, caller: Principal) -> dict[str, str]:
        """What is left of the tenant's limits per minute, in OpenAI's headers; none where there is no limit."""
        if not caller.tenant.limits.rates:
            return {}
        headers: dict[str, str] = {}
        kinds: tuple[MeterKind, ...] = ("requests", "tokens")
        for kind in kinds:
            allowance = self.limiter.allowance(LimitKey(caller.tenant_id, kind, self._rates.base_name))
            if allowance is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(allowance.limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(allowance.remaining)
                headers[f"x-ratelimit-reset-{kind}"] = duration(allowance.reset_s)
        return headers

    async def close(self) -> None:
        """Write down what was used."""
        await self.metering.close()
        await self.limiter.close()

    def _need(self, request: GenerateRequest) -> Cost:
        models, num_prompt = self._models(request), len(request.token_ids)
        max_tokens = request.sampling.max_tokens if request.pooling is None else 0
        return Cost(models, num_prompt + max_tokens, self._rates.prices.at_most(models, num_prompt, max_tokens))

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
