"""The routes by which OpenAI's admin client manages tenants, and `/v1/tenants` for what its objects cannot say.

In: requests with an admin key, and the tenants' owner. Out: routes. Paths, parameters, objects and pages are those of
OpenAI's specification (`client.admin.organization`). Rule: every route here asks for an admin key first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.openapi import takes
from app.deployments.ingress.http.request_parsing import int_query, list_query, page_body, read_json
from app.deployments.ingress.http.routes.usage import add_spend_routes, add_usage_routes
from app.deployments.ingress.schemas import admin as bodies
from app.deployments.ingress.schemas.request_model import BodyT, parse_body
from app.deployments.ingress.service import IngressService
from app.deployments.ingress.tenants import admin_caller
from app.deployments.tenants.client import TenantsClient
from app.deployments.tenants.entries import (
    DEFAULT_PAGE,
    LARGEST_PAGE,
    ApiKey,
    RateLimit,
    ServiceAccount,
    Tenant,
    TenantChange,
)
from app.engine.errors import InvalidRequest, NotFound

#: Before a rate limit's id comes this; behind it the model's name.
_RATE_PREFIX = "rl-"
#: What OpenAI's client may ask of the audit. It is chosen from by id, project and event; the others change nothing.
_AUDIT_QUERY = (
    "limit", "after", "before", "project_ids", "event_types",
    "actor_emails", "actor_ids", "effective_at", "resource_ids", "tenant_only",
)  # fmt: skip


def admin_router(service: IngressService) -> APIRouter:
    """All of them."""
    routes = APIRouter(prefix="/v1/organization", dependencies=[Depends(admin_caller)])
    _add_project_routes(routes, service)
    _add_account_routes(routes, service)
    _add_key_routes(routes, service)
    _add_right_routes(routes, service)
    _add_admin_key_routes(routes, service)
    _add_audit_routes(routes, service)
    add_usage_routes(routes, service.tenancy)
    add_spend_routes(routes, service.tenancy, service.frontend.limits.max_body_bytes)
    own = APIRouter(prefix="/v1/tenants", dependencies=[Depends(admin_caller)])
    _add_tenant_routes(own, service)
    both = APIRouter()
    both.include_router(routes)
    both.include_router(own)
    return both


async def _body(kind: type[BodyT], request: Request, service: IngressService) -> BodyT:
    return parse_body(kind, await read_json(request, service.frontend.limits.max_body_bytes))


def _actor(request: Request) -> str:
    return admin_caller(request).key_id


def _limit(request: Request, default: int = DEFAULT_PAGE) -> int:
    return int_query(request, "limit", default, LARGEST_PAGE)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} is {text[:40]!r}; it is true or false", param=name)
    return text == "true"


async def _page(
    request: Request, read: Callable[[int, str | None], Awaitable[Sequence[Any]]], body: Callable[[Any], dict[str, Any]]
) -> Response:
    """`?limit=&after=`: one more than is shown is read, to know whether there are more."""
    limit = _limit(request)
    found = await read(limit + 1, request.query_params.get("after"))
    return JSONResponse(page_body([body(item) for item in found[:limit]], has_more=len(found) > limit))


def _add_project_routes(routes: APIRouter, service: IngressService) -> None:
    owner = service.tenancy.owner

    @routes.get("/projects", openapi_extra=takes(None, "limit", "after", "include_archived"))
    async def projects(request: Request) -> Response:
        with_archived = _flag(request, "include_archived")

        async def read(limit: int, after: str | None) -> Sequence[Tenant]:
            return await owner.projects(limit, after, with_archived=with_archived)

        return await _page(request, read, bodies.project_body)

    @routes.post("/projects", openapi_extra=takes(bodies.ProjectBody))
    async def create(request: Request) -> Response:
        body = await _body(bodies.ProjectBody, request, service)
        return JSONResponse(bodies.project_body(await owner.create_project(body.name, actor=_actor(request))))

    @routes.get("/projects/{project_id}")
    async def project(project_id: str) -> Response:
        return JSONResponse(bodies.project_body(await owner.project(project_id)))

    @routes.post("/projects/{project_id}", openapi_extra=takes(bodies.ProjectBody))
    async def rename(project_id: str, request: Request) -> Response:
        body = await _body(bodies.ProjectBody, request, service)
        tenant = await owner.rename_project(project_id, body.name, actor=_actor(request))
        return JSONResponse(bodies.project_body(tenant))

    @routes.post("/projects/{project_id}/archive", openapi_extra=takes())
    async def archive(project_id: str, request: Request) -> Response:
        return JSONResponse(bodies.project_body(await owner.archive_project(project_id, actor=_actor(request))))


def _add_account_routes(routes: APIRouter, service: IngressService) -> None:
    owner = service.tenancy.owner

    @routes.get("/projects/{project_id}/service_accounts", openapi_extra=takes(None, "limit", "after"))
    async def accounts(project_id: str, request: Request) -> Response:
        async def read(limit: int, after: str | None) -> Sequence[ServiceAccount]:
            return await owner.accounts(project_id, limit, after)

        return await _page(request, read, bodies.account_body)

    @routes.post("/projects/{project_id}/service_accounts", openapi_extra=takes(bodies.AccountBody))
    async def create(project_id: str, request: Request) -> Response:
        body = await _body(bodies.AccountBody, request, service)
        if body.create_service_account_only and body.expires_in_seconds is not None:
            raise InvalidRequest(
                "expires_in_seconds is a key's, and create_service_account_only makes none", param="expires_in_seconds"
            )
        account, issued = await owner.create_account(
            project_id,
            body.name,
            with_key=not body.create_service_account_only,
            expires_in_s=body.expires_in_seconds,
            actor=_actor(request),
        )
        key = None if issued is None else bodies.issued_body(issued)
        return JSONResponse(bodies.account_body(account) | {"api_key": key}, headers={"Cache-Control": "no-store"})

    @routes.get("/projects/{project_id}/service_accounts/{account_id}")
    async def account(project_id: str, account_id: str) -> Response:
        return JSONResponse(bodies.account_body(await owner.account(project_id, account_id)))

    @routes.post("/projects/{project_id}/service_accounts/{account_id}", openapi_extra=takes(bodies.AccountUpdateBody))
    async def update(project_id: str, account_id: str, request: Request) -> Response:
        body = await _body(bodies.AccountUpdateBody, request, service)
        changed = await owner.update_account(project_id, account_id, name=body.name, actor=_actor(request))
        return JSONResponse(bodies.account_body(changed))

    @routes.delete("/projects/{project_id}/service_accounts/{account_id}")
    async def delete(project_id: str, account_id: str, request: Request) -> Response:
        await owner.delete_account(project_id, account_id, actor=_actor(request))
        return _deleted("organization.project.service_account.deleted", account_id)

    @routes.post("/projects/{project_id}/service_accounts/{account_id}/api_keys", openapi_extra=takes(bodies.KeyBody))
    async def create_key(project_id: str, account_id: str, request: Request) -> Response:
        body = await _body(bodies.KeyBody, request, service)
        issued = await owner.create_key(
            project_id, account_id, body.name, body.expires_in_seconds, actor=_actor(request)
        )
        return JSONResponse(bodies.issued_body(issued), headers={"Cache-Control": "no-store"})


def _add_key_routes(routes: APIRouter, service: IngressService) -> None:
    owner = service.tenancy.owner

    @routes.get("/projects/{project_id}/api_keys", openapi_extra=takes(None, "limit", "after", "owner_project_access"))
    async def keys(project_id: str, request: Request) -> Response:
        async def read(limit: int, after: str | None) -> Sequence[dict[str, Any]]:
            found = await owner.keys(project_id, limit, after)
            if request.query_params.get("owner_project_access") == "inactive":  # a revoked key is in no list
                return []
            return [await _key_body(owner, key) for key in found]

        return await _page(request, read, dict)

    @routes.get("/projects/{project_id}/api_keys/{key_id}")
    async def key(project_id: str, key_id: str) -> Response:
        return JSONResponse(await _key_body(owner, await owner.key(project_id, key_id)))

    @routes.post("/projects/{project_id}/api_keys/{key_id}", openapi_extra=takes(bodies.KeyUpdateBody))
    async def update(project_id: str, key_id: str, request: Request) -> Response:
        body = await _body(bodies.KeyUpdateBody, request, service)
        changed = await owner.expire_key(project_id, key_id, body.expires_in_seconds, actor=_actor(request))
        return JSONResponse(await _key_body(owner, changed))

    @routes.delete("/projects/{project_id}/api_keys/{key_id}")
    async def delete(project_id: str, key_id: str, request: Request) -> Response:
        await owner.revoke_key(project_id, key_id, actor=_actor(request))
        return _deleted("organization.project.api_key.deleted", key_id)


async def _key_body(owner: TenantsClient, key: ApiKey) -> dict[str, Any]:
    assert key.project_id is not None, "it is a project's key"
    assert key.service_account_id is not None, "so it has a service account"
    return bodies.key_body(key, await owner.account(key.project_id, key.service_account_id))


def _add_right_routes(routes: APIRouter, service: IngressService) -> None:
    owner = service.tenancy.owner

    @routes.get("/projects/{project_id}/model_permissions")
    async def models(project_id: str) -> Response:
        return JSONResponse(bodies.models_body(await owner.project(project_id)))

    @routes.post("/projects/{project_id}/model_permissions", openapi_extra=takes(bodies.ModelsBody))
    async def permit(project_id: str, request: Request) -> Response:
        body = await _body(bodies.ModelsBody, request, service)
        tenant = await owner.permit_models(project_id, body.mode, body.model_ids, actor=_actor(request))
        return JSONResponse(bodies.models_body(tenant))

    @routes.delete("/projects/{project_id}/model_permissions")
    async def permit_all(project_id: str, request: Request) -> Response:
        await owner.permit_models(project_id, None, (), actor=_actor(request))
        return JSONResponse({"object": "project.model_permissions.deleted", "deleted": True})

    @routes.get("/projects/{project_id}/rate_limits", openapi_extra=takes(None, "limit", "after", "before"))
    async def rate_limits(project_id: str, request: Request) -> Response:
        limit, after = _limit(request, LARGEST_PAGE), request.query_params.get("after")
        rates = {service.base_name: RateLimit(), **(await owner.project(project_id)).limits.rates}
        ordered = sorted(rates, key=lambda model: (model != service.base_name, model))
        if after is not None:
            if after.removeprefix(_RATE_PREFIX) not in ordered:
                raise NotFound(f"there is no rate limit {after[:80]!r}")
            ordered = ordered[ordered.index(after.removeprefix(_RATE_PREFIX)) + 1 :]
        data = [bodies.rate_limit_body(model, rates[model]) for model in ordered[:limit]]
        return JSONResponse(page_body(data, has_more=len(ordered) > limit))

    @routes.post("/projects/{project_id}/rate_limits/{rate_limit_id}", openapi_extra=takes(bodies.RateLimitBody))
    async def limit_rate(project_id: str, rate_limit_id: str, request: Request) -> Response:
        body = await _body(bodies.RateLimitBody, request, service)
        if not rate_limit_id.startswith(_RATE_PREFIX):
            raise NotFound(f"there is no rate limit {rate_limit_id[:80]!r}; that of a model is {_RATE_PREFIX}<model>")
        model = rate_limit_id.removeprefix(_RATE_PREFIX)
        asked = {
            "requests_per_min": body.max_requests_per_1_minute,
            "tokens_per_min": body.max_tokens_per_1_minute,
            "requests_per_day": body.max_requests_per_1_day,
        }
        changes = {name: value for name, value in asked.items() if value is not None}
        tenant = await owner.limit_rates(project_id, model, changes, actor=_actor(request))
        return JSONResponse(bodies.rate_limit_body(model, tenant.limits.rates.get(model, RateLimit())))


def _add_admin_key_routes(routes: APIRouter, service: IngressService) -> None:
    owner = service.tenancy.owner

    @routes.get("/admin_api_keys", openapi_extra=takes(None, "limit", "after", "order"))
    async def keys(request: Request) -> Response:
        order = request.query_params.get("order", "asc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order is {order[:40]!r}; it is asc or desc", param="order")

        async def read(limit: int, after: str | None) -> Sequence[ApiKey]:
            return await owner.keys(None, limit, after, is_newest_first=order == "desc")

        return await _page(request, read, bodies.admin_key_body)

    @routes.post("/admin_api_keys", openapi_extra=takes(bodies.AdminKeyBody))
    async def create(request: Request) -> Response:
        body = await _body(bodies.AdminKeyBody, request, service)
        issued = await owner.create_admin_key(body.name, body.expires_in_seconds, actor=_actor(request))
        answer = bodies.admin_key_body(issued.key) | {"value": issued.value}
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})

    @routes.get("/admin_api_keys/{key_id}")
    async def key(key_id: str) -> Response:
        return JSONResponse(bodies.admin_key_body(await owner.key(None, key_id)))

    @routes.delete("/admin_api_keys/{key_id}")
    async def delete(key_id: str, request: Request) -> Response:
        await owner.revoke_key(None, key_id, actor=_actor(request))
        return _deleted("organization.admin_api_key.deleted", key_id)


def _add_audit_routes(routes: APIRouter, service: IngressService) -> None:
    owner = service.tenancy.owner

    @routes.get("/audit_logs", openapi_extra=takes(None, *_AUDIT_QUERY))
    async def audit_logs(request: Request) -> Response:
        async def read(limit: int, _: str | None) -> Sequence[TenantChange]:
            return await owner.changes(
                limit,
                before=_audit_id(request, "after"),  # newest first: what comes after is older
                after=_audit_id(request, "before"),
                project_ids=list_query(request, "project_ids"),
                events=list_query(request, "event_types"),
            )

        return await _page(request, read, bodies.audit_body)


def _audit_id(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    number = text.removeprefix("audit_log-")
    if not (number.isascii() and number.isdigit() and len(number) < 16):
        raise InvalidRequest(f"{name} is {text[:40]!r}; it is the id of an audit log", param=name)
    return int(number)


def _add_tenant_routes(routes: APIRouter, service: IngressService) -> None:
    owner = service.tenancy.owner

    async def answer(tenant: Tenant) -> Response:
        return JSONResponse(bodies.tenant_body(tenant, await owner.shares(tenant.id), await owner.left(tenant.id)))

    @routes.get("/{tenant_id}")
    async def tenant(tenant_id: str) -> Response:
        return await answer(await owner.project(tenant_id))

    @routes.patch("/{tenant_id}", openapi_extra=takes(bodies.TenantBody))
    async def configure(tenant_id: str, request: Request) -> Response:
        body = await _body(bodies.TenantBody, request, service)
        given = {name: value for name, value in body.model_dump().items() if value is not None}
        settings = {name: None if name.startswith("max_") and value < 0 else value for name, value in given.items()}
        return await answer(await owner.configure_project(tenant_id, settings, actor=_actor(request)))

    @routes.post("/{tenant_id}/rotate_salt", openapi_extra=takes())
    async def rotate_salt(tenant_id: str, request: Request) -> Response:
        return await answer(await owner.rotate_salt(tenant_id, actor=_actor(request)))

    @routes.put("/{tenant_id}/shares/{name}", openapi_extra=takes(bodies.ShareBody))
    async def share(tenant_id: str, name: str, request: Request) -> Response:
        body = await _body(bodies.ShareBody, request, service)
        await owner.share(tenant_id, name, body.project_ids, actor=_actor(request))
        return await answer(await owner.project(tenant_id))


def _deleted(kind: str, row_id: str) -> Response:
    return JSONResponse({"object": kind, "id": row_id, "deleted": True})
