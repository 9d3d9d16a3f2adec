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

from app.deployments.ingress.http.request_parsing import Flag, PageQuery, QueryParams, page_body
from app.deployments.ingress.principal import http_principal
from app.deployments.ingress.serializers.loras import unload_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import AliasEntry, CatalogEntry

EntryT = TypeVar("EntryT", CatalogEntry, AliasEntry)


class WaitQuery(QueryParams):
    """`wait`: whether to answer when the work is done, instead of at once."""

    wait: Flag | None = None


def registry_page(
    request: Request,
    service: IngressService,
    query: PageQuery,
    kind: type[EntryT],
    body: Callable[[EntryT], dict[str, Any]],
) -> Response:
    """The page of names of one kind that the query asks for."""
    tenant_id = http_principal(request).tenant_id
    found = service.registry.page((kind,), limit=query.limit, after=query.after, tenant_id=tenant_id)
    data = [body(entry) for entry in found.entries if isinstance(entry, kind)]
    return JSONResponse(page_body(data, has_more=found.has_more))


async def unload_response(
    request: Request,
    service: IngressService,
    query: WaitQuery,
    name: str,
    besides: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Unload what a name means to the caller; `besides` goes into the answer. Raises as `AdapterAdmin.unload` does."""
    wait = query.wait is not False
    caller = http_principal(request)
    job, entry = await service.management.unload(name, tenant_id=caller.tenant_id, who=caller.who, wait=wait)
    return JSONResponse(unload_body(entry, job) | dict(besides), status_code=200 if wait else 202)
