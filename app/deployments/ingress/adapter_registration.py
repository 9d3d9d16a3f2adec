"""Registration of adapters (POST /v1/loras, also for the Python handle) and their status (GET /v1/loras/{name})."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.deployments.ingress.principal import Principal, compose_request, load_request
from app.deployments.ingress.schemas.loras import GenerationDefaults, RegisterAdapterBody
from app.deployments.ingress.serializers.loras import description_body, loaded_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import LoadRequest, Registration, cannot_pin_error
from app.deployments.tenancy.usage.adapter_stats import Activity
from app.engine.errors import InvalidRequest

#: Fields about memory. They (and loads) may be caused by another tenant with the same contents.
SHARED_FACTS = ("last_used", "residency")
#: Tiers an adapter is loaded from, the fastest last.
LOAD_TIERS = ("source", "disk", "device")


async def load_and_wait(body: RegisterAdapterBody, caller: Principal, service: IngressService) -> dict[str, Any]:
    """Load an adapter, or register it lazily: its entry. Raises the errors of `load_request_of` and the load's."""
    load = load_request_of(body, caller, service)
    if body.lazy:
        return await _register_lazily(body, load, caller, service)
    job, entry = await service.adapter_admin.store.load_and_wait(load)
    return loaded_body(entry, job, service.model_config)


def load_request_of(body: RegisterAdapterBody, caller: Principal, service: IngressService) -> LoadRequest:
    """Raises InvalidRequest, NotFound, UnsafeSource, ManagementRefused."""
    if body.name is None:
        raise InvalidRequest("name is missing; give the adapter a name", param="name")
    settings = (body.pinned, body.traffic_weight, body.description, defaults_json(body.defaults))
    if body.combine is None and body.path is not None:
        return load_request(caller, body.name, body.path, *settings, adapters=service.adapters_config)
    if body.combine is None or body.path is not None:
        raise InvalidRequest("give either path, where the adapter is, or combine, its parts", param="path")
    method = body.combine.combination_method
    combination = service.preprocessor.resolver.combine(body.combine.adapters, caller, method=method)
    return compose_request(caller, body.name, combination, *settings)


def defaults_json(defaults: GenerationDefaults | None) -> str | None:
    return None if defaults is None else defaults.to_json()


def registration(load: LoadRequest) -> Registration:
    return Registration(load.name, load.source, load.traffic_weight, load.description, load.defaults)


async def adapter_status(name: str, caller: Principal, service: IngressService) -> Mapping[str, Any]:
    """The body of `GET /v1/loras/{name}`. Raises NotFound, and NotReady while the store or placement is down.

    A project sees only what it caused itself: equal contents of two tenants share memory, and a shared name serves
    several tenants, but neither tenant may notice the other.
    """
    description = await service.adapter_admin.store.describe(name, tenant_id=caller.tenant_id)
    entry = description.entry
    if entry is None:
        return description_body(name, description, ())
    is_project = caller.kind == "project"
    metrics = service.adapter_metrics
    await metrics.flush()  # so that a client sees the request it has just sent to this ingress
    stats = await metrics.tenants_service.adapter_stats(entry.ref, tenant_id=caller.tenant_id if is_project else None)
    counts = {"since": int(stats.since_s)} | _activity_body(stats.activity)
    if is_project:
        body = description_body(name, description, ())
        return {field: value for field, value in body.items() if field not in SHARED_FACTS} | {"activity": counts}
    loads = {tier: stats.num_loads.get(tier, 0) for tier in LOAD_TIERS}
    replicas = await service.placer.residency(entry.ref.digest) if entry.is_read else ()
    return description_body(name, description, replicas) | {"activity": counts | {"loads": loads}}


async def _register_lazily(
    body: RegisterAdapterBody, load: LoadRequest, caller: Principal, service: IngressService
) -> dict[str, Any]:
    """Register a name without reading its adapter. Raises InvalidRequest for settings that need its contents."""
    if body.combine is not None:
        raise InvalidRequest(
            "lazy is true, but a combination is made when it is registered; leave lazy out", param="lazy"
        )
    if body.pinned:
        raise cannot_pin_error(load.name)
    store = service.adapter_admin.store
    await store.register([registration(load)], tenant_id=caller.tenant_id, who=caller.who)
    description = await store.describe(load.name, tenant_id=caller.tenant_id)
    return description_body(load.name, description, ())


def _activity_body(activity: Activity) -> dict[str, Any]:
    """Counts as JSON; times to first token are null if there were none."""
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
