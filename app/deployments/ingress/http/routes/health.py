"""The root, the version and the probes; each answers at once, without a replica or a key.

`/livez` is 200 while this process answers; `/readyz` and `/health` are 200 while requests for every base model would be
served, and 503 with Retry-After otherwise. At zero replicas with `http.ready_at_zero_replicas` they are 200 with
`asleep`: a request starts a replica. HAProxy answers all three while this process is not running.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.base_models import BaseModels
from app.deployments.ingress.schemas.health import Health, Liveness, Release, ServiceInfo
from app.engine.errors import NotReady
from app.version import version

#: The Retry-After of a service that is not ready.
RETRY_AFTER_S = 2.0


def add_health_routes(app: FastAPI, bases: BaseModels) -> None:
    @app.get("/", response_model=ServiceInfo)
    async def root() -> Response:
        """Version, base model and links."""
        links = {"openapi": "/openapi.json", "models": "/v1/models", "health": "/health"}
        return JSONResponse({"name": "polylora", "version": version(), "model": bases.first.base_name, "links": links})

    @app.get("/version", response_model=Release)
    async def release() -> Response:
        """The version of polylora."""
        return JSONResponse({"version": version()})

    @app.get("/livez", response_model=Liveness)
    async def livez() -> Response:
        """200 while the process answers."""
        return JSONResponse({"status": "alive"})

    async def health() -> Response:
        """200 while a request would be served, 503 otherwise."""
        if all(service.is_ready() for service in bases.services):
            return JSONResponse({"status": "ok"})
        if bases.first.may_sleep:
            return JSONResponse({"status": "asleep"})
        raise NotReady("a base model has no engine replica that is ready", retry_after_s=RETRY_AFTER_S)

    for path in ("/health", "/readyz"):
        app.get(path, response_model=Health)(health)
