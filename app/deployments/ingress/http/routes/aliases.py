"""The routes of aliases: names that stand for adapters, by weight.

In: `Management` and the ingress' copy of the registry. Out: routes under /v1/aliases. Rule: every change is a version
that a rollback can bring back.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.openapi import takes
from app.deployments.ingress.http.request_parsing import page_body
from app.deployments.ingress.http.routes.management import body_of, page_of
from app.deployments.ingress.schemas.request_model import Body
from app.deployments.ingress.serializers.loras import alias_body, alias_version_body
from app.deployments.ingress.service import IngressService
from app.deployments.ingress.tenants import http_caller
from app.deployments.registry.entries import AliasEntry
from app.engine.errors import NotFound


class AliasBody(Body):
    """Targets and their weights: {"sql-v1": 95, "sql-v2": 5}."""

    targets: dict[str, float]


class PromoteBody(Body):
    target: str


class RollbackBody(Body):
    version: int | None = Field(default=None, ge=1, lt=2**31)


def add_alias_routes(routes: APIRouter, service: IngressService) -> None:
    """All of /v1/aliases."""

    @routes.get("/v1/aliases", openapi_extra=takes(None, "limit", "after"))
    async def aliases(request: Request) -> Response:
        """Names that stand for adapters."""
        return page_of(request, service, AliasEntry, alias_body)

    @routes.get("/v1/aliases/{name}")
    async def alias(name: str, request: Request) -> Response:
        """One alias."""
        entry = service.registry.find(name, http_caller(request).tenant_id)
        if not isinstance(entry, AliasEntry):
            raise NotFound(f"there is no alias {name[:80]!r}; GET /v1/aliases lists them")
        return JSONResponse(alias_body(entry))

    @routes.get("/v1/aliases/{name}/versions")
    async def versions(name: str, request: Request) -> Response:
        """Everything an alias has stood for: what a rollback can bring back."""
        tenant_id = http_caller(request).tenant_id
        found = await service.management.store.alias_versions(name, tenant_id=tenant_id)
        return JSONResponse(page_body([alias_version_body(item) for item in found], has_more=False))

    @routes.put("/v1/aliases/{name}", openapi_extra=takes(AliasBody))
    async def put(name: str, request: Request) -> Response:
        """Send an alias's requests to these adapters, by weight."""
        body = await body_of(AliasBody, request, service)
        caller = http_caller(request)
        entry = await service.management.store.put_alias(name, body.targets, tenant_id=caller.tenant_id, who=caller.who)
        return JSONResponse(alias_body(entry))

    @routes.post("/v1/aliases/{name}/promote", openapi_extra=takes(PromoteBody))
    async def promote(name: str, request: Request) -> Response:
        """Send all of an alias's requests to one target."""
        body = await body_of(PromoteBody, request, service)
        caller = http_caller(request)
        entry = await service.management.store.promote_alias(
            name, body.target, tenant_id=caller.tenant_id, who=caller.who
        )
        return JSONResponse(alias_body(entry))

    @routes.post("/v1/aliases/{name}/rollback", openapi_extra=takes(RollbackBody))
    async def rollback(name: str, request: Request) -> Response:
        """Bring back an earlier version of an alias."""
        body = RollbackBody() if await _is_empty(request) else await body_of(RollbackBody, request, service)
        caller = http_caller(request)
        entry = await service.management.store.roll_back_alias(
            name, body.version, tenant_id=caller.tenant_id, who=caller.who
        )
        return JSONResponse(alias_body(entry))

    @routes.delete("/v1/aliases/{name}")
    async def delete(name: str, request: Request) -> Response:
        """Forget an alias."""
        caller = http_caller(request)
        entry = await service.management.store.remove_alias(name, tenant_id=caller.tenant_id, who=caller.who)
        return JSONResponse(alias_body(entry))


async def _is_empty(request: Request) -> bool:
    return request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
