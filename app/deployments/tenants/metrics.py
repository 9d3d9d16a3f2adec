"""What operators see of tenants, on Ray's Prometheus port (`ray.util.metrics`).

In: what tenants were served lately, and what limits have refused. Out: gauges of the largest tenants and of all others
together, an index of fairness, and counters of refusals. Rule: a tenant that is no longer among the largest has no
series: Ray drops a gauge that nobody sets again.
"""

from __future__ import annotations

from collections import Counter as Counts

from ray.util.metrics import Counter, Gauge

from app.deployments.tenants.attained import Attained
from app.deployments.tenants.limiter import Limiter, Refused


class TenantGauges:
    """One in the owner's process; set at every `repeat`, as a `SteadyGauge`."""

    def __init__(self, attained: Attained) -> None:
        self._attained = attained
        self._tokens = Gauge(
            "polylora_tenant_tokens_per_second",
            "Tokens of a tenant in the last minute, per second.",
            tag_keys=("tenant", "kind"),
        )
        self._loads = Gauge(
            "polylora_tenant_adapter_loads_per_second",
            "Adapter loads of a tenant in the last minute, per second.",
            tag_keys=("tenant",),
        )
        self._jain = Gauge(
            "polylora_tenant_fairness", "Jain's index of what tenants were served in the last minute, by weight."
        )

    def repeat(self) -> None:
        for tenant, served in self._attained.served().items():
            for kind in ("prompt", "cached", "completion"):
                self._tokens.set(getattr(served, kind), tags={"tenant": tenant, "kind": kind})
            self._loads.set(served.loads, tags={"tenant": tenant})
        self._jain.set(self._attained.jain_index())


class RefusalCounters:
    """One per ingress: what its limiter has refused, or would have, counted on at every `repeat`."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._told: Counts[Refused] = Counts()
        self._refusals = Counter(
            "polylora_refusals", "Requests beyond a tenant's limit.", tag_keys=("reason", "enforced")
        )

    def repeat(self) -> None:
        for refused, number in self._limiter.refused.items():
            if more := number - self._told[refused]:
                enforced = "yes" if refused.is_enforced else "no"
                self._refusals.inc(more, tags={"reason": refused.kind, "enforced": enforced})
                self._told[refused] = number
