"""What the service says of itself: that it lives, that it is ready, which version it is, and what can be asked of it.

In: whether any engine can be used, and the application's own routes. Out: short JSON. Rule: none of these needs a
replica, a token or a body, and each answers at once.

Probes: `/livez` is 200 while this process answers; `/readyz` and `/health` are 200 while a request would be served, and
503 with Retry-After otherwise. Where there may be no engine replica at all (`http.ready_at_zero_replicas`) a request is
served once it has had one started, and they say `asleep`. Behind HAProxy all three are answered for this process while
it is not there.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.schemas.health import Health, Liveness, Release, ServiceInfo
from app.deployments.ingress.service import IngressService
from app.engine.errors import NotReady
from app.version import version

#: How soon somebody who found nothing ready should ask again.
RETRY_AFTER_S = 2.0


def add_health_routes(app: FastAPI, service: IngressService) -> None:
    """All of them."""

    @app.get("/", response_model=ServiceInfo)
    async def root() -> Response:
        """The service in a few words: version, base model, where to go on."""
        links = {"openapi": "/openapi.json", "models": "/v1/models", "health": "/health"}
        body = {"name": "polylora", "version": version(), "model": service.base_name, "links": links}
        return JSONResponse(body)

    @app.get("/version", response_model=Release)
    async def release() -> Response:
        """The release of polylora that answers."""
        return JSONResponse({"version": version()})

    @app.get("/livez", response_model=Liveness)
    async def livez() -> Response:
        """200 while the process answers."""
        return JSONResponse({"status": "alive"})

    async def health() -> Response:
        """200 while a request would be served, 503 otherwise."""
        if service.is_ready():
            return JSONResponse({"status": "ok"})
        if service.may_sleep:
            return JSONResponse({"status": "asleep"})
        raise NotReady("no engine replica is ready", retry_after_s=RETRY_AFTER_S)

    for path in ("/health", "/readyz"):
        app.get(path, response_model=Health)(health)
