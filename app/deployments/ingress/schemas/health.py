"""Responses of the root, the version, the probes and /v1/status."""

from __future__ import annotations

from typing import Any, Literal

from app.deployments.ingress.schemas.loras import EventResponse
from app.deployments.ingress.schemas.response_model import Omittable, ResponseModel


class RootLinks(ResponseModel):
    openapi: str
    models: str
    health: str


class ServiceInfo(ResponseModel):
    name: Literal["polylora"]
    version: str
    model: str
    links: RootLinks


class Release(ResponseModel):
    version: str


class Liveness(ResponseModel):
    status: Literal["alive"]


class Health(ResponseModel):
    """`asleep`: there are zero replicas, and a request starts one."""

    status: Literal["ok", "asleep"]


class ServiceStatus(ResponseModel):
    """A project gets only the required fields. `replicas`: statistics of replicas; `tiers`: of the store."""

    object: Literal["status"]
    version: str
    model: str
    is_ready: bool
    num_adapters: Omittable[int] = None
    num_open_requests: Omittable[int] = None
    replicas: Omittable[list[dict[str, Any]]] = None
    tiers: Omittable[dict[str, Any]] = None
    failures: Omittable[list[EventResponse]] = None
