"""/v1/aliases: names that stand for adapters, by weight. Every change is a version that a rollback can restore."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.request_parsing import JsonBody, PageQuery, page_body
from app.deployments.ingress.principal import http_principal
from app.deployments.ingress.schemas.loras import Alias, AliasBody, AliasVersionResponse, PromoteBody, RollbackBody
from app.deployments.ingress.schemas.response_model import PageResponse
from app.deployments.ingress.serializers.loras import alias_body, alias_version_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import AliasEntry
from app.engine.errors import NotFound


def add_alias_routes(routes: APIRouter, service: IngressService) -> None:
    @routes.get("/v1/aliases", response_model=PageResponse[Alias])
    async def aliases(request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """List aliases."""
        tenant_id = http_principal(request).tenant_id
        found = service.registry.page((AliasEntry,), limit=query.limit, after=query.after, tenant_id=tenant_id)
        data = [alias_body(entry) for entry in found.entries if isinstance(entry, AliasEntry)]
        return JSONResponse(page_body(data, has_more=found.has_more))

    @routes.get("/v1/aliases/{name:model}", response_model=Alias)
    async def alias(name: str, request: Request) -> Response:
        """One alias."""
        entry = service.registry.alias(name, http_principal(request).tenant_id)
        if entry is None:
            raise NotFound(f"there is no alias {name[:80]!r}; GET /v1/aliases lists them")
        return JSONResponse(alias_body(entry))

    @routes.get("/v1/aliases/{name:model}/versions", response_model=PageResponse[AliasVersionResponse])
    async def versions(name: str, request: Request) -> Response:
        """The versions of an alias, which a rollback can restore."""
        tenant_id = http_principal(request).tenant_id
        found = await service.adapter_admin.store.alias_versions(name, tenant_id=tenant_id)
        return JSONResponse(page_body([alias_version_body(item) for item in found], has_more=False))

    @routes.put("/v1/aliases/{name:model}", response_model=Alias)
    async def put(name: str, request: Request, body: JsonBody[AliasBody]) -> Response:
        """Create or change an alias: its target adapters and their weights."""
        caller = http_principal(request)
        entry = await service.adapter_admin.store.put_alias(
            name, body.targets, tenant_id=caller.tenant_id, who=caller.who
        )
        return JSONResponse(alias_body(entry))

    @routes.post("/v1/aliases/{name:model}/promote", response_model=Alias)
    async def promote(name: str, request: Request, body: JsonBody[PromoteBody]) -> Response:
        """Send all of an alias's requests to one target."""
        caller = http_principal(request)
        entry = await service.adapter_admin.store.promote_alias(
            name, body.target, tenant_id=caller.tenant_id, who=caller.who
        )
        return JSONResponse(alias_body(entry))

    @routes.post("/v1/aliases/{name:model}/rollback", response_model=Alias)
    async def rollback(name: str, request: Request, body: JsonBody[RollbackBody]) -> Response:
        """Restore an earlier version of an alias."""
        caller = http_principal(request)
        entry = await service.adapter_admin.store.roll_back_alias(
            name, body.version, tenant_id=caller.tenant_id, who=caller.who
        )
        return JSONResponse(alias_body(entry))

    @routes.delete("/v1/aliases/{name:model}", response_model=Alias)
    async def delete(name: str, request: Request) -> Response:
        """Delete an alias."""
        caller = http_principal(request)
        entry = await service.adapter_admin.store.remove_alias(name, tenant_id=caller.tenant_id, who=caller.who)
        return JSONResponse(alias_body(entry))
