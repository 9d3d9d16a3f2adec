"""OpenAI's admin API (`client.admin.organization`), and `/v1/tenants` for settings that OpenAI's objects do not have.

Every route requires an admin key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.request_parsing import (
    Flag,
    JsonBody,
    Order,
    QueryParams,
    UnixTime,
    WholeNumber,
    page_body,
)
from app.deployments.ingress.http.routes.usage import add_spend_routes, add_usage_routes
from app.deployments.ingress.principal import admin_principal
from app.deployments.ingress.schemas import admin as schemas
from app.deployments.ingress.schemas.response_model import DeletedResponse, PageResponse
from app.deployments.ingress.serializers import admin as serializers
from app.deployments.ingress.service import IngressService
from app.deployments.tenancy.models import (
    DEFAULT_PAGE,
    LARGEST_PAGE,
    ApiKey,
    RateLimit,
    Tenant,
    TenantChange,
    TenantLimits,
)
from app.deployments.tenancy.service import TenantsService
from app.engine.errors import InvalidRequest, NotFound

#: The id of a rate limit is this prefix and the model's name.
_RATE_PREFIX = "rl-"
AdminLimit = Annotated[int, WholeNumber(1, LARGEST_PAGE)]


class AdminPageQuery(QueryParams):
    limit: AdminLimit = DEFAULT_PAGE
    after: str | None = None


class ProjectQuery(AdminPageQuery):
    include_archived: Flag = False


class KeyQuery(AdminPageQuery):
    """Revoked keys are not listed, so no key is "inactive"."""

    owner_project_access: str | None = None


class RateLimitQuery(AdminPageQuery):
    """`before` is ignored."""

    limit: AdminLimit = LARGEST_PAGE
    before: str | None = None


class AdminKeyQuery(AdminPageQuery):
    order: Order = "asc"


class TimeRange(BaseModel):
    """Unix seconds."""

    model_config = ConfigDict(extra="forbid")

    gt: UnixTime | None = None
    gte: UnixTime | None = None
    lt: UnixTime | None = None
    lte: UnixTime | None = None


class AuditLogQuery(AdminPageQuery):
    """Actors are keys, which have no e-mail address, and no entry belongs to a tenant above the organization:
    `actor_emails` and `tenant_only` are rejected."""

    before: str | None = None
    project_ids: list[str] = Field(default_factory=list)
    event_types: list[str] = Field(default_factory=list)
    actor_ids: list[str] = Field(default_factory=list)
    resource_ids: list[str] = Field(default_factory=list)
    effective_at: TimeRange = Field(default_factory=TimeRange)
    actor_emails: list[str] = Field(default_factory=list)
    tenant_only: Flag = False


def admin_router(service: IngressService) -> APIRouter:
    """The routes under /v1/organization and /v1/tenants."""
    tenants_service = service.accounting.tenants_service
    routes = APIRouter(prefix="/v1/organization", dependencies=[Depends(admin_principal)])
    _add_project_routes(routes, tenants_service, service.new_project_limits)
    _add_account_routes(routes, service)
    _add_key_routes(routes, service)
    _add_permission_routes(routes, service)
    _add_admin_key_routes(routes, tenants_service)
    _add_audit_routes(routes, tenants_service)
    add_usage_routes(routes, service.accounting)
    add_spend_routes(routes, service.accounting)
    tenants = APIRouter(prefix="/v1/tenants", dependencies=[Depends(admin_principal)])
    _add_tenant_routes(tenants, tenants_service)
    all_routes = APIRouter()
    all_routes.include_router(routes)
    all_routes.include_router(tenants)
    return all_routes


def _actor(request: Request) -> str:
    return admin_principal(request).key_id


async def _page(
    query: AdminPageQuery,
    read: Callable[[int, str | None], Awaitable[Sequence[Any]]],
    body: Callable[[Any], dict[str, Any]],
) -> Response:
    """Reads one entry more than the page has, to know whether there are more."""
    found = await read(query.limit + 1, query.after)
    return JSONResponse(page_body([body(item) for item in found[: query.limit]], has_more=len(found) > query.limit))


def _add_project_routes(routes: APIRouter, tenants_service: TenantsService, new: TenantLimits) -> None:
    """`new`: the limits of a new project."""

    @routes.get("/projects", response_model=PageResponse[schemas.Project])
    async def projects(query: Annotated[ProjectQuery, Query()]) -> Response:
        """List projects."""
        read = partial(tenants_service.projects, with_archived=query.include_archived)
        return await _page(query, read, serializers.project_body)

    @routes.post("/projects", response_model=schemas.Project)
    async def create(request: Request, body: JsonBody[schemas.ProjectBody]) -> Response:
        """Create a project, which is a tenant."""
        made = await tenants_service.create_project(body.name, actor=_actor(request), limits=new)
        return JSONResponse(serializers.project_body(made))

    @routes.get("/projects/{project_id}", response_model=schemas.Project)
    async def project(project_id: str) -> Response:
        """Describe a project."""
        return JSONResponse(serializers.project_body(await tenants_service.project(project_id)))

    @routes.post("/projects/{project_id}", response_model=schemas.Project)
    async def rename(project_id: str, request: Request, body: JsonBody[schemas.ProjectBody]) -> Response:
        """Rename a project."""
        tenant = await tenants_service.rename_project(project_id, body.name, actor=_actor(request))
        return JSONResponse(serializers.project_body(tenant))

    @routes.post("/projects/{project_id}/archive", response_model=schemas.Project)
    async def archive(project_id: str, request: Request) -> Response:
        """Archive a project; its keys stop working."""
        return JSONResponse(
            serializers.project_body(await tenants_service.archive_project(project_id, actor=_actor(request)))
        )


def _add_account_routes(routes: APIRouter, service: IngressService) -> None:
    tenants_service = service.accounting.tenants_service

    @routes.get("/projects/{project_id}/service_accounts", response_model=PageResponse[schemas.ServiceAccountResponse])
    async def accounts(project_id: str, query: Annotated[AdminPageQuery, Query()]) -> Response:
        """List a project's service accounts."""
        return await _page(query, partial(tenants_service.accounts, project_id), serializers.account_body)

    @routes.post("/projects/{project_id}/service_accounts", response_model=schemas.NewServiceAccount)
    async def create(project_id: str, request: Request, body: JsonBody[schemas.AccountBody]) -> Response:
        """Create a service account and its first API key, whose value is shown once."""
        if body.create_service_account_only and body.expires_in_seconds is not None:
            raise InvalidRequest(
                "expires_in_seconds is a key's, and create_service_account_only makes none", param="expires_in_seconds"
            )
        account, issued = await tenants_service.create_account(
            project_id,
            body.name,
            with_key=not body.create_service_account_only,
            expires_in_s=body.expires_in_seconds,
            role=body.role,
            actor=_actor(request),
        )
        key = None if issued is None else serializers.issued_body(issued)
        return JSONResponse(serializers.account_body(account) | {"api_key": key}, headers={"Cache-Control": "no-store"})

    @routes.get("/projects/{project_id}/service_accounts/{account_id}", response_model=schemas.ServiceAccountResponse)
    async def account(project_id: str, account_id: str) -> Response:
        """Describe a service account."""
        return JSONResponse(serializers.account_body(await tenants_service.account(project_id, account_id)))

    @routes.post("/projects/{project_id}/service_accounts/{account_id}", response_model=schemas.ServiceAccountResponse)
    async def update(
        project_id: str, account_id: str, request: Request, body: JsonBody[schemas.AccountUpdateBody]
    ) -> Response:
        """Rename a service account, or change its role."""
        changed = await tenants_service.update_account(
            project_id, account_id, name=body.name, role=body.role, actor=_actor(request)
        )
        return JSONResponse(serializers.account_body(changed))

    @routes.delete("/projects/{project_id}/service_accounts/{account_id}", response_model=schemas.DeletedKeys)
    async def delete(project_id: str, account_id: str, request: Request) -> Response:
        """Delete a service account and its keys, which ends their batches."""
        keys = await tenants_service.delete_account(project_id, account_id, actor=_actor(request))
        ended = await _end_batches(service, project_id, keys)
        return _deleted_response("organization.project.service_account.deleted", account_id, ended_batches=ended)

    @routes.post(
        "/projects/{project_id}/service_accounts/{account_id}/api_keys", response_model=schemas.IssuedKeyResponse
    )
    async def create_key(
        project_id: str, account_id: str, request: Request, body: JsonBody[schemas.KeyBody]
    ) -> Response:
        """Create an API key; its value is shown once."""
        issued = await tenants_service.create_key(
            project_id, account_id, body.name, body.expires_in_seconds, actor=_actor(request)
        )
        return JSONResponse(serializers.issued_body(issued), headers={"Cache-Control": "no-store"})


def _add_key_routes(routes: APIRouter, service: IngressService) -> None:
    tenants_service = service.accounting.tenants_service

    @routes.get("/projects/{project_id}/api_keys", response_model=PageResponse[schemas.ApiKeyResponse])
    async def keys(project_id: str, query: Annotated[KeyQuery, Query()]) -> Response:
        """List a project's API keys, without their values."""

        async def read(limit: int, after: str | None) -> Sequence[dict[str, Any]]:
            found = await tenants_service.keys(project_id, limit, after)
            if query.owner_project_access == "inactive":
                return []
            return [await _key_body(tenants_service, key) for key in found]

        return await _page(query, read, dict)

    @routes.get("/projects/{project_id}/api_keys/{key_id}", response_model=schemas.ApiKeyResponse)
    async def key(project_id: str, key_id: str) -> Response:
        """Describe an API key."""
        return JSONResponse(await _key_body(tenants_service, await tenants_service.key(project_id, key_id)))

    @routes.post("/projects/{project_id}/api_keys/{key_id}", response_model=schemas.ApiKeyResponse)
    async def update(project_id: str, key_id: str, request: Request, body: JsonBody[schemas.KeyUpdateBody]) -> Response:
        """Change when an API key expires."""
        changed = await tenants_service.expire_key(project_id, key_id, body.expires_in_seconds, actor=_actor(request))
        return JSONResponse(await _key_body(tenants_service, changed))

    @routes.delete("/projects/{project_id}/api_keys/{key_id}", response_model=schemas.DeletedKeys)
    async def delete(project_id: str, key_id: str, request: Request) -> Response:
        """Delete an API key, which ends its batches."""
        revoked = await tenants_service.revoke_key(project_id, key_id, actor=_actor(request))
        ended = await _end_batches(service, project_id, [revoked])
        return _deleted_response("organization.project.api_key.deleted", key_id, ended_batches=ended)


async def _end_batches(service: IngressService, project_id: str, keys: Sequence[ApiKey]) -> list[str]:
    """Ids of the open batches of revoked keys: whichever process works on them refuses their remaining lines."""
    ended = await service.storage.open_batches([key.id for key in keys], tenant_id=project_id)
    service.wake_batches()
    return ended


async def _key_body(tenants_service: TenantsService, key: ApiKey) -> dict[str, Any]:
    assert key.project_id is not None, "a project's key"
    assert key.service_account_id is not None, "a project's key belongs to a service account"
    return serializers.key_body(key, await tenants_service.account(key.project_id, key.service_account_id))


def _add_permission_routes(routes: APIRouter, service: IngressService) -> None:
    tenants_service = service.accounting.tenants_service

    @routes.get("/projects/{project_id}/model_permissions", response_model=schemas.ModelPermissions)
    async def models(project_id: str) -> Response:
        """Show which models and adapters a project may use."""
        return JSONResponse(serializers.models_body(await tenants_service.project(project_id)))

    @routes.post("/projects/{project_id}/model_permissions", response_model=schemas.ModelPermissions)
    async def permit(project_id: str, request: Request, body: JsonBody[schemas.ModelsBody]) -> Response:
        """Allow a project these models and adapters only, or all others."""
        tenant = await tenants_service.permit_models(project_id, body.mode, body.model_ids, actor=_actor(request))
        return JSONResponse(serializers.models_body(tenant))

    @routes.delete("/projects/{project_id}/model_permissions", response_model=schemas.DeletedSetting)
    async def permit_all(project_id: str, request: Request) -> Response:
        """Allow a project all models and adapters."""
        await tenants_service.permit_models(project_id, None, (), actor=_actor(request))
        return JSONResponse({"object": "project.model_permissions.deleted", "deleted": True})

    @routes.get("/projects/{project_id}/rate_limits", response_model=PageResponse[schemas.ProjectRateLimit])
    async def rate_limits(project_id: str, query: Annotated[RateLimitQuery, Query()]) -> Response:
        """List a project's rate limits, one per model."""
        limit, after = query.limit, query.after
        rates = dict.fromkeys(service.base_names, RateLimit())
        rates |= (await tenants_service.project(project_id)).limits.rates
        ordered = [*service.base_names, *sorted(rates.keys() - set(service.base_names))]
        if after is not None:
            if after.removeprefix(_RATE_PREFIX) not in ordered:
                raise NotFound(f"there is no rate limit {after[:80]!r}")
            ordered = ordered[ordered.index(after.removeprefix(_RATE_PREFIX)) + 1 :]
        data = [serializers.rate_limit_body(model, rates[model]) for model in ordered[:limit]]
        return JSONResponse(page_body(data, has_more=len(ordered) > limit))

    @routes.post("/projects/{project_id}/rate_limits/{rate_limit_id:model}", response_model=schemas.ProjectRateLimit)
    async def limit_rate(
        project_id: str, rate_limit_id: str, request: Request, body: JsonBody[schemas.RateLimitBody]
    ) -> Response:
        """Change a rate limit; its id is the prefix `rl-` and the model's name."""
        if not rate_limit_id.startswith(_RATE_PREFIX):
            raise NotFound(f"there is no rate limit {rate_limit_id[:80]!r}; their ids are {_RATE_PREFIX}<model>")
        model = rate_limit_id.removeprefix(_RATE_PREFIX)
        limits = {
            "requests_per_min": body.max_requests_per_1_minute,
            "tokens_per_min": body.max_tokens_per_1_minute,
            "requests_per_day": body.max_requests_per_1_day,
        }
        changes = {name: value for name, value in limits.items() if value is not None}
        tenant = await tenants_service.limit_rates(project_id, model, changes, actor=_actor(request))
        return JSONResponse(serializers.rate_limit_body(model, tenant.limits.rates.get(model, RateLimit())))


def _add_admin_key_routes(routes: APIRouter, tenants_service: TenantsService) -> None:
    @routes.get("/admin_api_keys", response_model=PageResponse[schemas.AdminKey])
    async def keys(query: Annotated[AdminKeyQuery, Query()]) -> Response:
        """List admin keys, without their values."""
        read = partial(tenants_service.keys, None, is_newest_first=query.order == "desc")
        return await _page(query, read, serializers.admin_key_body)

    @routes.post("/admin_api_keys", response_model=schemas.NewAdminKey)
    async def create(request: Request, body: JsonBody[schemas.AdminKeyBody]) -> Response:
        """Create an admin key; its value is shown once."""
        issued = await tenants_service.create_admin_key(body.name, body.expires_in_seconds, actor=_actor(request))
        answer = serializers.admin_key_body(issued.key) | {"value": issued.value}
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})

    @routes.get("/admin_api_keys/{key_id}", response_model=schemas.AdminKey)
    async def key(key_id: str) -> Response:
        """Describe an admin key."""
        return JSONResponse(serializers.admin_key_body(await tenants_service.key(None, key_id)))

    @routes.delete("/admin_api_keys/{key_id}", response_model=DeletedResponse)
    async def delete(key_id: str, request: Request) -> Response:
        """Delete an admin key."""
        await tenants_service.revoke_key(None, key_id, actor=_actor(request))
        return _deleted_response("organization.admin_api_key.deleted", key_id)


def _add_audit_routes(routes: APIRouter, tenants_service: TenantsService) -> None:
    @routes.get("/audit_logs", response_model=PageResponse[schemas.AuditLog])
    async def audit_logs(query: Annotated[AuditLogQuery, Query()]) -> Response:
        """List changes made through the admin and management API, newest first."""
        for name in ("actor_emails", "tenant_only"):
            if getattr(query, name):
                raise InvalidRequest(f"entries cannot be chosen by {name}; leave it out", param=name)

        async def read(limit: int, _: str | None) -> Sequence[TenantChange]:
            return await tenants_service.changes(
                limit,
                before=_audit_number("after", query.after),  # newest first: the next page is older
                after=_audit_number("before", query.before),
                project_ids=query.project_ids,
                events=query.event_types,
                **_audit_filters(query),
            )

        return await _page(query, read, serializers.audit_body)


def _audit_filters(query: AuditLogQuery) -> dict[str, Any]:
    """The filters that are asked for: the actor of an earlier release, which runs beside this one, takes no others."""
    times = query.effective_at
    since = [*([] if times.gte is None else [times.gte]), *([] if times.gt is None else [times.gt + 1])]
    until = [*([] if times.lt is None else [times.lt]), *([] if times.lte is None else [times.lte + 1])]
    filters = {
        "actors": query.actor_ids,
        "targets": query.resource_ids,
        "since_s": max(since, default=None),
        "until_s": min(until, default=None),
    }
    return {name: value for name, value in filters.items() if value not in ([], None)}


def _audit_number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    number = text.removeprefix("audit_log-")
    if not (number.isascii() and number.isdigit() and len(number) < 16):
        raise InvalidRequest(f"{name} is {text[:40]!r}; it is the id of an audit log", param=name)
    return int(number)


def _add_tenant_routes(routes: APIRouter, tenants_service: TenantsService) -> None:
    async def answer(tenant: Tenant) -> Response:
        return JSONResponse(
            serializers.tenant_body(
                tenant, await tenants_service.shares(tenant.id), await tenants_service.remaining(tenant.id)
            )
        )

    @routes.get("/{tenant_id}", response_model=schemas.TenantDetails)
    async def tenant(tenant_id: str) -> Response:
        """Describe a tenant: its settings, what remains of its limits, and the adapters that it shares."""
        return await answer(await tenants_service.project(tenant_id))

    @routes.patch("/{tenant_id}", response_model=schemas.TenantDetails)
    async def configure(tenant_id: str, request: Request, body: JsonBody[schemas.TenantBody]) -> Response:
        """Change a tenant's settings; -1 removes a limit, and "" the hub token."""
        given = {name: value for name, value in body.model_dump().items() if value is not None}
        removed = {name for name, value in given.items() if name != "weight" and value in (-1, "")}
        settings = given | dict.fromkeys(removed)
        return await answer(await tenants_service.configure_project(tenant_id, settings, actor=_actor(request)))

    @routes.post("/{tenant_id}/rotate_salt", response_model=schemas.TenantDetails)
    async def rotate_salt(tenant_id: str, request: Request) -> Response:
        """Replace a tenant's KV salt: its cached prefixes are not used any more."""
        return await answer(await tenants_service.rotate_salt(tenant_id, actor=_actor(request)))

    @routes.put("/{tenant_id}/shares/{name:model}", response_model=schemas.TenantDetails)
    async def share(tenant_id: str, name: str, request: Request, body: JsonBody[schemas.ShareBody]) -> Response:
        """Share an adapter with these projects, and no others."""
        await tenants_service.share(tenant_id, name, body.project_ids, actor=_actor(request))
        return await answer(await tenants_service.project(tenant_id))


def _deleted_response(kind: str, row_id: str, **more: object) -> Response:
    return JSONResponse({"object": kind, "id": row_id, "deleted": True} | more)
