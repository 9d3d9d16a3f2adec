"""The routes that tell what happens: status, jobs, events, audit.

In: `Management`. Out: routes. Rule: a tenant reads what its own calls caused, an operator everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.bodies import MAX_PAGE, int_query, page_body
from app.deployments.ingress.http.managed import ManagedService
from app.deployments.ingress.http.openapi import takes
from app.deployments.ingress.management_bodies import job_body, record_body
from app.deployments.ingress.tenants import http_caller
from app.deployments.registry.entries import AuditRecord, Event
from app.deployments.store.client import StoreClient

#: Events that a tenant's own calls cause. Others may be caused by whoever has the same contents.
OWN_EVENTS = frozenset({
    "requested", "routable", "failed", "registered", "registered unread", "draining", "removed",
    "put alias", "promote alias", "roll back alias", "remove alias",
})  # fmt: skip


def add_journal_routes(routes: APIRouter, service: ManagedService) -> None:
    """Status, jobs, events and the audit."""

    @routes.get("/v1/status")
    async def status(request: Request) -> Response:
        """Replicas, tiers and recent failures, for operators; a project sees only that the service is up."""
        return JSONResponse(await service.status(http_caller(request)))

    @routes.get("/v1/jobs/{job_id}", openapi_extra=takes(told="LoraJob"))
    async def job(job_id: str, request: Request) -> Response:
        """A load or an unload: its state and its reason."""
        tenant_id = http_caller(request).tenant_id
        return JSONResponse(job_body(await service.management.store.job(job_id, tenant_id=tenant_id)))

    @routes.get("/v1/events", openapi_extra=takes(None, "name", "limit", "before"))
    async def events(request: Request) -> Response:
        """What happened, the newest first."""
        caller, store = http_caller(request), service.management.store
        query = _journal_query(request)
        if caller.kind == "project":
            return _journal_page(await _own_events(store, query, caller.tenant_id), query.limit)
        records = await store.events(query.name, limit=query.limit + 1, before=query.before, tenant_id=caller.tenant_id)
        return _journal_page(records, query.limit)

    @routes.get("/v1/audit", openapi_extra=takes(None, "name", "limit", "before"))
    async def audit(request: Request) -> Response:
        """Requests to change something and who sent them, newest first."""
        caller = http_caller(request)
        query = _journal_query(request)
        records = await service.management.store.audit(
            query.name, limit=query.limit + 1, before=query.before, tenant_id=caller.tenant_id
        )
        return _journal_page(records, query.limit)


async def _own_events(store: StoreClient, query: _JournalQuery, tenant_id: str) -> list[Event]:
    """A page and one more. Events that others caused are read over: a page that they shorten would tell of them."""
    found: list[Event] = []
    before = query.before
    while len(found) <= query.limit:
        records = await store.events(query.name, limit=MAX_PAGE, before=before, tenant_id=tenant_id)
        found += [record for record in records if record.event in OWN_EVENTS]
        if len(records) < MAX_PAGE:
            break
        before = records[-1].id
    return found[: query.limit + 1]


class _JournalQuery(NamedTuple):
    """`before` is the id of the last record that is known."""

    limit: int
    name: str | None
    before: str | None


def _journal_query(request: Request) -> _JournalQuery:
    """`?name=&limit=&before=`: the newest first."""
    query = request.query_params
    return _JournalQuery(int_query(request, "limit", 100), query.get("name"), query.get("before"))


def _journal_page(records: Sequence[Event] | Sequence[AuditRecord], limit: int) -> Response:
    told = [record_body(record) for record in records[:limit]]
    return JSONResponse(page_body(told, has_more=len(records) > limit))
