"""All routes that manage adapters and aliases.

In: the ingress. Out: routes. Rule: each kind has a module of its own.
"""

from __future__ import annotations

from fastapi import APIRouter

from app.deployments.ingress.http.routes.aliases import add_alias_routes
from app.deployments.ingress.http.routes.audit import add_journal_routes
from app.deployments.ingress.http.routes.compat import add_load_routes
from app.deployments.ingress.http.routes.loras import add_adapter_routes
from app.deployments.ingress.service import IngressService


def add_management_routes(routes: APIRouter, service: IngressService) -> None:
    """All of them."""
    add_load_routes(routes, service)
    add_adapter_routes(routes, service)
    add_journal_routes(routes, service)
    add_alias_routes(routes, service)
