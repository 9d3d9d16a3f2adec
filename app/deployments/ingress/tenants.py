"""Who asks: the one place at the door that says whose request it is.

In: a request. Out: its `Caller`. Everything behind the door is given the tenant and supposes none. Without keys all
callers are one tenant.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

from starlette.requests import Request

from app.deployments.registry.entries import DEFAULT_TENANT


class Caller(NamedTuple):
    """`who` is written into the audit."""

    tenant_id: str
    who: str


def http_caller(request: Request) -> Caller:
    """Who sent an HTTP request. A proxy that is not ours may let clients write what they like for an address."""
    try:
        who = f"http {ipaddress.ip_address(request.client.host)}" if request.client else "http"
    except ValueError:
        who = "http, from no address"
    return Caller(DEFAULT_TENANT, who)


def handle_caller() -> Caller:
    """Another Ray job, through the deployment's handle."""
    return Caller(DEFAULT_TENANT, "handle")
