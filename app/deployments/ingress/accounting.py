"""Tenants' limits and usage in one ingress: admission, settlement, and counts for the ledger.

Keys and limits are read from `TenantMirror`, a copy in this process's memory. Every task reserves its cost and is
counted once before it runs, and is settled once after it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.principal import Principal
from app.deployments.registry.models import DEFAULT_TENANT
from app.deployments.rpc.background_tasks import repeat
from app.deployments.rpc.long_poll_client import LongPollClient
from app.deployments.rpc.long_poll_host import Changes
from app.deployments.tenancy.auth.tenant_mirror import TenantMirror
from app.deployments.tenancy.models import NO_LIMITS, PUBLIC, Tenant, TenantKey, TenantRow
from app.deployments.tenancy.quota.limits import Cost, LimitKey, LimitKind, request_costs
from app.deployments.tenancy.quota.rate_limiter import RateLimiter, Reservation
from app.deployments.tenancy.service import TenantsService
from app.deployments.tenancy.usage.flusher import UsageFlusher
from app.deployments.tenancy.usage.prices import Prices, paid_models
from app.deployments.tenancy.usage.recorder import UsageRecorder
from app.deployments.tenancy.usage.wal import UsageWal
from app.engine.adapters.card import AdapterRef
from app.engine.errors import NotReady
from app.engine.request import GenerateRequest, Usage

logger = logging.getLogger(__name__)

#: How often the last uses of keys are reported.
KEY_USE_INTERVAL_S = 60.0


class TenantTableClient(LongPollClient[Changes[TenantKey, TenantRow]]):
    """Copies the tenants' table into `view`. `complete` is set once the copy has caught up."""

    def __init__(
        self, tenants_service: TenantsService, watcher_id: str, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(tenants_service.watch, watcher_id)
        self._clock = clock
        self.view = TenantMirror()
        self.complete = asyncio.Event()

    def _apply(self, update: Changes[TenantKey, TenantRow]) -> None:
        self.view.take(update)
        if update.is_last:
            self.complete.set()

    def _on_answer(self) -> None:
        self.view.confirmed_s = self._clock()


class ReservedQuota(NamedTuple):
    """Reservation of a routed request (`model: "auto"`): the request itself, and the tokens of choosing its adapter."""

    request: Reservation
    tokens: Reservation


class PricingContext(NamedTuple):
    """Prices of tokens, and the base model's name, under which limits apply to all of its adapters."""

    prices: Prices
    base_name: str


class RequestAccounting:
    """One per ingress. `clock` gives Unix time, `monotonic` seconds that never go back; `holder` is an id unique to
    this process."""

    def __init__(
        self,
        view: TenantMirror,
        tenants_service: TenantsService,
        pricing: PricingContext,
        holder: str,
        clock: Callable[[], float],
        wal: UsageWal | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = view
        self.tenants_service = tenants_service
        self.clock = clock
        self.limiter = RateLimiter(tenants_service.lease, holder, monotonic)
        self.usage_flusher = UsageFlusher(tenants_service.record, holder, wal)
        self.usage_recorder = UsageRecorder(self.usage_flusher, pricing.prices, pricing.base_name, clock)
        self._pricing = pricing
        self._is_copy = False
        self._key_used_s: dict[str, float] = {}

    def for_base(self, pricing: PricingContext) -> RequestAccounting:
        """The same keys, limits and usage, for requests of another base model. This one reports and closes them."""
        other = copy.copy(self)
        other._pricing, other._is_copy = pricing, True
        other.usage_recorder = UsageRecorder(self.usage_flusher, pricing.prices, pricing.base_name, self.clock)
        return other

    async def charge_arrival(self, caller: Principal, *, is_inference: bool) -> Reservation:
        """Reserve what an HTTP request costs before its body is read. Raises LimitError.

        For inference that is one request and a place among the concurrent ones, otherwise one call. `admit` and its
        like take it over. The reserver settles what was not taken over: a refused request is charged, too.
        """
        tenant = caller.tenant
        if tenant.limits == NO_LIMITS:
            return Reservation({}, is_settled=True)
        if is_inference:
            return await self.limiter.reserve(tenant, self._one_request(tenant, (self._pricing.base_name,)))
        await self.charge_calls(caller, 1)
        return Reservation({}, is_settled=True)

    async def charge_calls(self, caller: Principal, number: int) -> None:
        """Count calls of a project. Raises LimitError."""
        if caller.tenant.limits.calls_per_min is not None:
            costs = {LimitKey(caller.tenant_id, "calls"): number}
            self.limiter.settle(await self.limiter.reserve(caller.tenant, costs), {})

    async def admit(
        self, caller: Principal, requests: Sequence[GenerateRequest], existing: Reservation | None = None
    ) -> Reservation:
        """Reserve the most that these sequences may cost, and count the request. Raises LimitError.

        A line of a batch is counted when it is answered, because it may be tried again. The new reservation takes over
        `existing`, the routing's, or the one of the request's arrival.
        """
        reservation = Reservation({}, is_settled=True)
        if caller.tenant.limits != NO_LIMITS:
            needs = [self._need(request) for request in requests]
            costs = request_costs(caller.tenant, self._pricing.base_name, needs)
            reservation = await self.limiter.reserve(caller.tenant, costs, existing or caller.reservation)
        if not caller.is_batch:
            self.usage_recorder.record_request(requests[0])
        return reservation

    async def admit_routing(self, caller: Principal, num_tokens: int, *, has_price: bool) -> ReservedQuota:
        """Reserve one request and the tokens of choosing its adapter, with the base model's price or none. Raises
        LimitError."""
        reservation = Reservation({}, is_settled=True)
        if caller.tenant.limits != NO_LIMITS:
            costs = self._embedding_costs(caller.tenant, num_tokens, has_price=has_price)
            reservation = await self.limiter.reserve(caller.tenant, costs, caller.reservation)
        return ReservedQuota(*reservation.split(("tokens", "spend")))

    @asynccontextmanager
    async def charge_request(self, caller: Principal, ref: AdapterRef | None) -> AsyncIterator[None]:
        """Reserve one request that needs no engine (counting tokens, for instance) while the block runs. Raises
        LimitError.

        It has no tokens and no cost, so only limits on requests apply.
        """
        reservation = Reservation({}, is_settled=True)
        if caller.tenant.limits != NO_LIMITS:
            costs = self._one_request(caller.tenant, paid_models(ref, self._pricing.base_name))
            reservation = await self.limiter.reserve(caller.tenant, costs, caller.reservation)
        try:
            yield
        finally:
            self.limiter.settle(reservation, {})

    def owner(self, tenant_id: str) -> Principal:
        """The caller of work that a tenant's adapters need and no request asked for."""
        return Principal(tenant_id, "adapter descriptions", self.tenant(tenant_id) or PUBLIC)

    def tenant(self, tenant_id: str) -> Tenant | None:
        """A tenant with its present limits and permissions, also the default one; None if it is unknown."""
        return PUBLIC if tenant_id == DEFAULT_TENANT else self.view.tenant(tenant_id)

    async def charge_tokens(self, caller: Principal, num_tokens: int, *, has_price: bool) -> None:
        """Count tokens of embedded texts that belong to no request, with the base model's price or none. Raises
        LimitError."""
        costs = self._embedding_costs(caller.tenant, num_tokens, has_price=has_price)
        taken = {key: amount for key, amount in costs.items() if key.kind in ("tokens", "spend")}
        self.limiter.settle(await self.limiter.reserve(caller.tenant, taken), {})

    def finish_routing(self, quota: ReservedQuota) -> None:
        """Charge all tokens of the routing decision."""
        self.limiter.settle(quota.tokens, {})

    def release(self, quota: ReservedQuota, *, is_repeated: bool) -> None:
        """Settle what no admission has taken over. Tokens are given back, because none were computed.

        `is_repeated`: the request will be made again, so it does not count yet.
        """
        self.give_back(quota.tokens)
        if is_repeated:
            self.give_back(quota.request)
        else:
            self.limiter.settle(quota.request, {})

    def give_back(self, reservation: Reservation) -> None:
        """Settle a reservation whose units are all unused."""
        self.limiter.settle(reservation, dict.fromkeys(reservation.units, 0))

    def count_routed_request(self, caller: Principal) -> None:
        self.usage_recorder.record_routing_request(caller.tenant_id, caller.key_id)

    def end(self, task: GenerationTask, *, is_cut: bool) -> None:
        """Settle a task's reservation. Usage of its sequences is recorded where they were computed.

        `is_cut` says that the client left. Then the whole prompt is charged even before the first token; otherwise a
        client that always leaves early would have prompts computed without limit.
        """
        self._settle(task, is_cut=is_cut)

    def requeue(self, task: GenerationTask) -> None:
        """Give back a batch's task that will be tried again, including its request."""
        self._settle(task, is_request=False)

    def _settle(self, task: GenerationTask, *, is_cut: bool = False, is_request: bool = True) -> None:
        if task.reservation.is_settled:
            return
        costs: list[Cost] = []
        for request, usage in zip(task.requests, task.usages, strict=True):
            models = self._models(request)
            used = usage or Usage(len(request.token_ids) if is_cut else 0, 0, 0)
            cost = self._pricing.prices.of(models, used)
            costs.append(Cost(models, used.prompt_tokens + used.completion_tokens, cost))
        actual = request_costs(task.caller.tenant, self._pricing.base_name, costs)
        if not is_request:
            actual |= {key: 0 for key in actual if key.kind in ("requests", "day")}
        self.limiter.settle(task.reservation, actual)

    def headers(self, caller: Principal) -> dict[str, str]:
        """The tenant's remaining limits per minute in OpenAI's headers; {} without limits."""
        if not caller.tenant.limits.rates:
            return {}
        headers: dict[str, str] = {}
        kinds: tuple[LimitKind, ...] = ("requests", "tokens")
        for kind in kinds:
            allowance = self.limiter.allowance(LimitKey(caller.tenant_id, kind, self._pricing.base_name))
            if allowance is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(allowance.limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(allowance.remaining)
                headers[f"x-ratelimit-reset-{kind}"] = duration(allowance.reset_s)
        return headers

    async def close(self) -> None:
        """Write unreported usage, then stop."""
        if self._is_copy:
            return
        await self.usage_flusher.close()
        await self.limiter.close()

    def _one_request(self, tenant: Tenant, models: tuple[str, ...]) -> dict[LimitKey, int]:
        """The costs of a request without tokens."""
        costs = request_costs(tenant, self._pricing.base_name, [Cost(models, 0, 0)])
        return {key: amount for key, amount in costs.items() if amount}

    def _embedding_costs(self, tenant: Tenant, num_tokens: int, *, has_price: bool) -> dict[LimitKey, int]:
        models = (self._pricing.base_name,)
        price = self._pricing.prices.at_most(models, num_tokens, 0) if has_price else 0
        return request_costs(tenant, models[0], [Cost(models, num_tokens, price)])

    def _need(self, request: GenerateRequest) -> Cost:
        models, num_prompt = self._models(request), len(request.token_ids)
        max_tokens = request.sampling.max_tokens if request.pooling is None else 0
        return Cost(models, num_prompt + max_tokens, self._pricing.prices.at_most(models, num_prompt, max_tokens))

    def _models(self, request: GenerateRequest) -> tuple[str, ...]:
        return paid_models(request.requested_adapter, self._pricing.base_name)

    def note_key_use(self, key_id: str, now_s: float) -> None:
        """Remember that a key was used; reported later."""
        self._key_used_s[key_id] = now_s

    async def keep_reporting_key_use(self) -> None:
        """Run `report_key_use` every minute until cancelled."""
        await repeat(self.report_key_use, KEY_USE_INTERVAL_S, "reporting the last use of keys")

    async def report_key_use(self) -> None:
        """Report when keys were used since the last call. A failed report is merged into the next one."""
        used_s, self._key_used_s = self._key_used_s, {}
        if not used_s:
            return
        try:
            await self.tenants_service.note_use(used_s)
        except NotReady as error:
            self._key_used_s = used_s | self._key_used_s
            logger.info("cannot record the last use of %d keys yet, will retry: %s", len(used_s), error)


def duration(seconds: float) -> str:
    """Seconds in Go's format, which OpenAI uses: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 1000) / 1000:g}s"
    whole = math.ceil(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{whole % 60}s"
