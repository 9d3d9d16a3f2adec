"""What all routes that manage adapters and aliases share.

In: a request. Out: its body, its query, a page of names. Rule: lists are read from the ingress' copy of the registry,
so that they cost no call whatever their length; what is said of one adapter is asked of the registry itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.request_parsing import page_body, page_query, read_json
from app.deployments.ingress.schemas.request_model import BodyT, parse_body
from app.deployments.ingress.serializers.loras import unloaded_body
from app.deployments.ingress.service import IngressService
from app.deployments.ingress.tenants import http_caller
from app.deployments.registry.entries import AliasEntry, CatalogEntry
from app.engine.errors import InvalidRequest

EntryT = TypeVar("EntryT", CatalogEntry, AliasEntry)


async def body_of(kind: type[BodyT], request: Request, service: IngressService) -> BodyT:
    """The request's body. Raises as `read_json` and `parse_body` do."""
    return parse_body(kind, await read_json(request, service.frontend.limits.max_body_bytes))


def wants_to_wait(request: Request, default: bool) -> bool:
    """`?wait=`. Raises InvalidRequest."""
    text = request.query_params.get("wait", str(default))
    wants = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if wants is None:
        raise InvalidRequest(f"wait is {text[:40]!r}; it is true or false", param="wait")
    return wants


def page_of(
    request: Request, service: IngressService, kind: type[EntryT], body: Callable[[EntryT], dict[str, Any]]
) -> Response:
    """The page of names of one kind that the query asks for."""
    page = page_query(request)
    found = service.registry.page((kind,), limit=page.limit, after=page.after, tenant_id=http_caller(request).tenant_id)
    data = [body(entry) for entry in found.entries if isinstance(entry, kind)]
    return JSONResponse(page_body(data, has_more=found.has_more))


async def unloaded_answer(
    request: Request, service: IngressService, name: str, besides: Mapping[str, str] = MappingProxyType({})
) -> Response:
    """Unload what a name means to the caller; `besides` goes into the answer. Raises as `Management.unload` does."""
    wait = wants_to_wait(request, True)
    caller = http_caller(request)
    job, entry = await service.management.unload(name, tenant_id=caller.tenant_id, who=caller.who, wait=wait)
    return JSONResponse(unloaded_body(entry, job) | dict(besides), status_code=200 if wait else 202)
