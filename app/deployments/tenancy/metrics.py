"""Metrics of tenants and adapters on Ray's Prometheus port (`ray.util.metrics`).

Gauges cover the largest tenants and busiest adapters, and all others together. One that is no longer among them loses
its series: Ray drops a gauge that is not set again.
"""

from __future__ import annotations

from collections import Counter as Counts

from ray.util.metrics import Counter, Gauge

from app.deployments.tenancy.quota.rate_limiter import RateLimiter, RejectedRequest
from app.deployments.tenancy.usage.adapter_stats import SHORT_DIGEST, AdapterStatsTable, BusyAdapters
from app.deployments.tenancy.usage.tenant_throughput import WINDOW_S, TenantThroughput


class TenantGauges:
    """One per owner process; set at every `repeat`, like a `SteadyGauge`."""

    def __init__(self, throughput: TenantThroughput) -> None:
        self._throughput = throughput
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
            "polylora_tenant_fairness", "Jain's index of the tenants' service in the last minute, by weight."
        )

    def repeat(self) -> None:
        for tenant, served in self._throughput.by_tenant().items():
            for kind in ("prompt", "cached", "completion"):
                self._tokens.set(getattr(served, kind), tags={"tenant": tenant, "kind": kind})
            self._loads.set(served.loads, tags={"tenant": tenant})
        self._jain.set(self._throughput.jain_index())


class AdapterGauges:
    """One per store process: the busiest adapters of the last minute, by owner, name and short digest.

    All others together have the name `other` and no owner.
    """

    def __init__(self, stats: AdapterStatsTable) -> None:
        self._stats = stats
        self._requests = Gauge(
            "polylora_adapter_requests_per_second",
            "Requests for an adapter in the last minute, per second.",
            tag_keys=("tenant", "adapter", "digest", "outcome"),
        )
        self._tokens = Gauge(
            "polylora_adapter_tokens_per_second",
            "Tokens of an adapter in the last minute, per second.",
            tag_keys=("tenant", "adapter", "digest", "kind"),
        )
        self._first_token_s = Gauge(
            "polylora_adapter_time_to_first_token_seconds",
            "Quantiles of an adapter's time to first token in the last minute.",
            tag_keys=("tenant", "adapter", "digest", "quantile"),
        )
        self._loads = Gauge(
            "polylora_adapter_loads_per_second",
            "Loads of an adapter's contents from a tier (device: to a device) in the last minute, per second.",
            tag_keys=("tenant", "adapter", "digest", "tier"),
        )

    def repeat(self) -> None:
        for busy in self._stats.busiest():
            self._publish(busy)

    def _publish(self, busy: BusyAdapters) -> None:
        adapter, activity = busy.adapter, busy.activity
        tags = {"tenant": adapter.owner_id, "adapter": adapter.name, "digest": adapter.digest[:SHORT_DIGEST]}
        outcomes = {"ok": activity.num_requests - activity.num_errors, "error": activity.num_errors}
        for outcome, number in outcomes.items():
            self._requests.set(number / WINDOW_S, tags=tags | {"outcome": outcome})
        for kind in ("prompt", "cached", "completion"):
            self._tokens.set(getattr(activity, f"{kind}_tokens") / WINDOW_S, tags=tags | {"kind": kind})
        if activity.num_first_tokens:
            for part in (0.5, 0.99):
                time_s = activity.first_token_quantile_s(part)
                self._first_token_s.set(time_s, tags=tags | {"quantile": str(part)})
        for tier, number in busy.num_loads.items():
            self._loads.set(number / WINDOW_S, tags=tags | {"tier": tier})


class RejectionCounters:
    """One per ingress: requests that its limiter rejected, or would have."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._counted: Counts[RejectedRequest] = Counts()
        self._rejections = Counter(
            "polylora_rate_limit_rejections", "Requests beyond a tenant's limit.", tag_keys=("reason", "enforced")
        )

    def repeat(self) -> None:
        for rejected, number in self._limiter.rejected.items():
            if more := number - self._counted[rejected]:
                enforced = "yes" if rejected.is_enforced else "no"
                self._rejections.inc(more, tags={"reason": rejected.kind, "enforced": enforced})
                self._counted[rejected] = number
