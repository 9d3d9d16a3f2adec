"""/v1/overview: the service's state and its last hour, once or as a stream of events; and
/v1/residency: which replica has which adapter; /v1/replicas: draining one; /v1/settings; and /metrics.

A project gets its own requests and adapters, and nothing of replicas and memory, which all tenants share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from app.deployments.ingress.base_models import BaseModels
from app.deployments.ingress.error_responses import WrongKeyKind
from app.deployments.ingress.http.event_stream import EventStream
from app.deployments.ingress.http.openapi import EVENT_STREAM, JSON_ERROR
from app.deployments.ingress.http.request_parsing import Flag, QueryParams, WholeNumber, page_body
from app.deployments.ingress.principal import Principal, http_principal
from app.deployments.ingress.schemas.health import DrainedReplica, Overview, ResidencyMap, SettingResponse
from app.deployments.ingress.schemas.response_model import PageResponse
from app.deployments.ingress.serializers.completion_events import sse
from app.deployments.ingress.service import IngressService
from app.deployments.tenancy.usage.traffic_history import BUCKET_S
from app.engine.errors import QueueFull

#: Open streams of one ingress, and how long one lasts: the client connects again, perhaps to another ingress, and an
#: ingress that is to end soon does not wait long for them.
MAX_STREAMS, STREAM_S = 100, 60.0
_Time = Annotated[int, WholeNumber(0, 10**11)]


class OverviewQuery(QueryParams):
    """`since`: only the samples after this Unix time. `stream`: as events, one every five seconds."""

    since: _Time = 0
    stream: Flag = False


class ResidencyQuery(QueryParams):
    """`name`: only this adapter, with the order in which placement prefers replicas for it."""

    name: str | None = None


class DrainQuery(QueryParams):
    """`force`: also if no other replica could take its requests."""

    force: Flag = False


def add_overview_routes(routes: APIRouter, service: IngressService, bases: BaseModels) -> None:
    num_streams = 0

    @routes.get("/v1/overview", response_model=Overview, responses=EVENT_STREAM)
    async def overview(request: Request, query: Annotated[OverviewQuery, Query()]) -> Response:
        """The service's state, and its last hour in samples of five seconds; once, or as events."""
        nonlocal num_streams
        caller = http_principal(request)
        body = await service.overview.body(caller, query.since)
        if not query.stream:
            return JSONResponse(body)
        if num_streams >= MAX_STREAMS:
            raise QueueFull(f"{MAX_STREAMS} pages follow this ingress, the limit; ask without stream")
        num_streams += 1

        def end(_: int) -> None:
            nonlocal num_streams
            num_streams -= 1

        return EventStream(sse(body), _later(service, caller, body), end, {})

    @routes.get("/v1/residency", response_model=ResidencyMap)
    async def residency(request: Request, query: Annotated[ResidencyQuery, Query()]) -> Response:
        """Which replica has which adapter, and why; for operators."""
        caller = http_principal(request)
        if caller.kind == "project":
            raise WrongKeyKind("replicas are shared by all projects; an admin key shows where adapters are")
        return JSONResponse(await service.overview.residency(query.name, caller.tenant_id))

    @routes.post("/v1/replicas/{replica_id}/drain", response_model=DrainedReplica, status_code=202)
    async def drain(replica_id: str, request: Request, query: Annotated[DrainQuery, Query()]) -> Response:
        """Have an engine replica end its requests and take no new ones; Ray Serve replaces it. For operators."""
        caller = http_principal(request)
        if caller.kind == "project":
            raise WrongKeyKind("replicas are shared by all projects; an admin key drains them")
        owner = next((each for each in bases.services if each.has_replica(replica_id)), service)
        await owner.drain_replica(replica_id, caller.who, force=query.force)
        return JSONResponse({"id": replica_id, "object": "replica", "state": "draining"}, status_code=202)

    @routes.get("/metrics", response_class=PlainTextResponse, responses=JSON_ERROR)
    async def metrics(request: Request) -> Response:
        """This service's metrics in Prometheus's text format, of all processes on all nodes; for operators."""
        if http_principal(request).kind == "project":
            raise WrongKeyKind("metrics are of all projects; an admin key reads them")
        return PlainTextResponse(await service.metrics_agents.text(), media_type="text/plain; version=0.0.4")

    @routes.get("/v1/settings", response_model=PageResponse[SettingResponse])
    async def settings(request: Request) -> Response:
        """Every setting of the service, its default and what it does; for operators."""
        if http_principal(request).kind == "project":
            raise WrongKeyKind("the service's settings are shown with an admin key")
        return JSONResponse(page_body(service.overview.settings(), has_more=False))


async def _later(service: IngressService, caller: Principal, body: dict[str, Any]) -> AsyncGenerator[bytes]:
    """The bodies after the first, each with the samples since the one before."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + STREAM_S
    while loop.time() < until_s:
        await asyncio.sleep(BUCKET_S)
        times = body["samples"]["times"]
        since_s = times[-1] if times else int(body["since"])
        body = await service.overview.body(caller, since_s)
        yield sse(body)
