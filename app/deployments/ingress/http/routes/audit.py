"""/v1/status, /v1/jobs, /v1/events and /v1/audit. A tenant reads what its own calls caused, an operator everything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.base_models import BaseModels
from app.deployments.ingress.http.request_parsing import Limit, QueryParams, page_body
from app.deployments.ingress.principal import http_principal, visible_events
from app.deployments.ingress.schemas import loras as schemas
from app.deployments.ingress.schemas.health import ServiceStatus
from app.deployments.ingress.schemas.loras import LoraJob
from app.deployments.ingress.schemas.response_model import PageResponse
from app.deployments.ingress.serializers.loras import job_body, record_body
from app.deployments.ingress.service import IngressService
from app.deployments.registry.models import AuditRecord, Event
from app.engine.errors import NotFound


class RecordQuery(QueryParams):
    """Newest first; `before` is the id of the previous page's last record."""

    name: str | None = None
    limit: Limit = 100
    before: str | None = None


def add_audit_routes(routes: APIRouter, service: IngressService, bases: BaseModels) -> None:
    @routes.get("/v1/status", response_model=ServiceStatus)
    async def status(request: Request) -> Response:
        """Replicas, tiers and recent failures for an operator; only readiness for a project."""
        return JSONResponse(await service.status(http_principal(request)))

    @routes.get("/v1/jobs/{job_id}", response_model=LoraJob)
    async def job(job_id: str, request: Request) -> Response:
        """The state of a load or an unload."""
        tenant_id = http_principal(request).tenant_id
        *others, last = bases.services
        for each in others:
            with suppress(NotFound):
                return JSONResponse(job_body(await each.adapter_admin.store.job(job_id, tenant_id=tenant_id)))
        return JSONResponse(job_body(await last.adapter_admin.store.job(job_id, tenant_id=tenant_id)))

    @routes.get("/v1/events", response_model=PageResponse[schemas.EventResponse])
    async def events(request: Request, query: Annotated[RecordQuery, Query()]) -> Response:
        """Adapter events, newest first."""
        caller = http_principal(request)
        records = await service.adapter_admin.store.events(
            query.name,
            limit=query.limit + 1,
            before=query.before,
            tenant_id=caller.tenant_id,
            only=visible_events(caller),
        )
        return _record_page(records, query.limit)

    @routes.get("/v1/audit", response_model=PageResponse[schemas.AuditRecordResponse])
    async def audit(request: Request, query: Annotated[RecordQuery, Query()]) -> Response:
        """Management calls and their callers, newest first."""
        caller = http_principal(request)
        records = await service.adapter_admin.store.audit(
            query.name, limit=query.limit + 1, before=query.before, tenant_id=caller.tenant_id
        )
        return _record_page(records, query.limit)


def _record_page(records: Sequence[Event] | Sequence[AuditRecord], limit: int) -> Response:
    data = [record_body(record) for record in records[:limit]]
    return JSONResponse(page_body(data, has_more=len(records) > limit))
