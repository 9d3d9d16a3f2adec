"""Registration of adapters by the body of POST /v1/loras, for that route and the Python handle."""

from __future__ import annotations

from typing import Any

from app.deployments.ingress.principal import Principal, compose_request, load_request
from app.deployments.ingress.schemas.loras import GenerationDefaults, RegisterAdapterBody
from app.deployments.ingress.serializers.loras import description_body, loaded_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import LoadRequest, Registration, cannot_pin_error
from app.engine.errors import InvalidRequest


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
