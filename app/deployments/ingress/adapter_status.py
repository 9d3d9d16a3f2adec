"""One adapter as `GET /v1/loras/{name}` describes it: its registration, where it is, and what was seen of it.

In: a name and who asks. Out: the body of the answer. Rule: a project is shown what it caused itself. Equal contents of
two tenants share memory, and a shared name's requests are of several tenants: neither is to notice the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.deployments.ingress.adapter_admin import AdapterAdmin
from app.deployments.ingress.adapter_metrics import AdapterMetrics
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.serializers.loras import description_body
from app.deployments.tenancy.usage.adapter_stats import Activity

#: What a description says of memory; loads, too, are caused by whoever has the same contents.
SHARED_FACTS = ("last_used", "residency")
#: Tiers that an adapter is brought up from, the fastest last.
TIERS = ("source", "disk", "device")


async def adapter_status(
    management: AdapterAdmin, activity: AdapterMetrics, name: str, caller: Principal
) -> Mapping[str, Any]:
    """Raises NotFound, and NotReady while the store or placement is away."""
    description = await management.store.describe(name, tenant_id=caller.tenant_id)
    entry = description.entry
    if entry is None:
        return description_body(name, description, ())
    is_project = caller.kind == "project"
    await activity.tell()  # so that whoever asks after a request sees it, if it was of this ingress
    seen = await activity.owner.adapter_stats(entry.ref, tenant_id=caller.tenant_id if is_project else None)
    told = {"since": int(seen.since_s)} | activity_body(seen.activity)
    if is_project:
        body = description_body(name, description, ())
        return {field: value for field, value in body.items() if field not in SHARED_FACTS} | {"activity": told}
    loads = {tier: seen.num_loads.get(tier, 0) for tier in TIERS}
    replicas = await management.residency(entry.ref.digest) if entry.is_read else ()
    return description_body(name, description, replicas) | {"activity": told | {"loads": loads}}


def activity_body(activity: Activity) -> dict[str, Any]:
    """Amounts; null for times to first token where there were none."""
    times = None
    if number := activity.num_first_tokens:
        times = {"count": number, "mean": activity.first_token_s / number}
        times |= {f"p{part}": activity.first_token_quantile_s(part / 100) for part in (50, 99)}
    return {
        "requests": activity.num_requests,
        "errors": activity.num_errors,
        "prompt_tokens": activity.prompt_tokens,
        "cached_tokens": activity.cached_tokens,
        "completion_tokens": activity.completion_tokens,
        "time_to_first_token_seconds": times,
    }
