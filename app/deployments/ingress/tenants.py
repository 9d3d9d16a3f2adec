"""Who asks: the one place at the door that says whose request it is.

In: a request. Out: its `Caller`. Everything behind the door is given the tenant and supposes none. Without keys all
callers are one tenant.
"""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request

from app.deployments.registry.entries import DEFAULT_TENANT


class Caller(NamedTuple):
    """`who` is written into the audit."""

    tenant_id: str
    who: str


def http_caller(request: Request) -> Caller:
    """Who sent an HTTP request."""
    return Caller(DEFAULT_TENANT, f"http {request.client.host}" if request.client else "http")


def handle_caller() -> Caller:
    """Another Ray job, through the deployment's handle."""
    return Caller(DEFAULT_TENANT, "handle")
