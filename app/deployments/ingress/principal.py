"""Who asks: the one place at the door that says whose request it is.

In: a request that the door has let in. Out: its `Principal`. Everything behind the door is given the tenant and supposes
none. Without keys all callers are one tenant, whose adapters are everybody's when there are keys.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Literal, NamedTuple

from starlette.requests import HTTPConnection

from app.deployments.ingress.error_responses import ManagementRefused, WrongKeyKind
from app.deployments.registry.feed.view import Entry, Page, RegistryView
from app.deployments.registry.models import DEFAULT_TENANT, UPLOADED, AliasEntry, CatalogEntry, LoadRequest
from app.deployments.tenancy.models import PUBLIC, Tenant
from app.engine.adapters.combining.combination import Combination, is_composition
from app.engine.errors import InvalidRequest, UnsafeSource
from app.redaction import holds_key

#: Where the door leaves the caller, in the request's state.
STATE = "caller"


class Principal(NamedTuple):
    """`who` is written into the audit.

    `kind`: open, without a key; project, with a project's; operator, who manages adapters with the management token;
    admin, with an admin key, who manages adapters too, those of `tenant_id`. `is_batch`: nobody waits for the answer.
    """

    tenant_id: str
    who: str
    tenant: Tenant = PUBLIC
    key_id: str = ""
    kind: Literal["open", "project", "operator", "admin"] = "open"
    is_batch: bool = False

    def owners(self, name: str) -> Iterator[str]:
        """The tenants among whose names this one is looked for, in order: its own, those shared with it, the public."""
        if not self.tenant.may_use(name):
            return
        yield self.tenant_id
        for owner_id, shared_name in sorted(self.tenant.shared) if self.tenant.shared else ():
            if shared_name == name:
                yield owner_id
        if self.tenant_id != DEFAULT_TENANT:
            yield DEFAULT_TENANT


def http_principal(request: HTTPConnection) -> Principal:
    """Who sent an HTTP request, as the door found out."""
    caller: Principal = request.scope["state"][STATE]
    return caller


def inference_principal(request: HTTPConnection) -> Principal:
    """Who asks for tokens. Raises WrongKeyKind for keys that only administer."""
    caller = http_principal(request)
    if caller.kind in ("operator", "admin"):
        raise WrongKeyKind("this key administers and asks no model; use a key of a project")
    return caller


def admin_principal(request: HTTPConnection) -> Principal:
    """Who administers. Raises WrongKeyKind for everybody else."""
    caller = http_principal(request)
    if caller.kind != "admin":
        raise WrongKeyKind("tenants are managed with an admin key; polylora create-admin-key makes the first")
    return caller


def load_request(
    caller: Principal,
    name: str,
    source: str,
    pinned: bool | None = None,
    traffic_weight: float | None = None,
    description: str | None = None,
) -> LoadRequest:
    """What is asked of the store when a caller loads an adapter.

    Raises UnsafeSource, ManagementRefused, InvalidRequest.

    A project's folders are those below its own, `<root>/<project id>/`: the others are the operator's or another's.
    """
    check_settings(caller, pinned, traffic_weight, description)
    if holds_key(source):  # the audit and events have it
        raise UnsafeSource("the adapter's place holds an API key; leave it out")
    if is_composition(source):  # it names places, and is made here only, of adapters that the caller may use
        raise UnsafeSource(f"{source[:80]!r} is no place; POST /v1/loras with compose combines adapters")
    if source.startswith(UPLOADED):  # whose it is nobody could say; the service makes these
        raise UnsafeSource(f"{source[:80]!r} is no place; PUT /v1/loras/{{name}}/weights takes an adapter's bytes")
    if caller.kind == "project" and "://" not in source and not source.startswith(f"{caller.tenant_id}/"):
        raise UnsafeSource(
            f"{source[:80]!r} is not below {caller.tenant_id}/, where this project's folders are; give a path there or "
            "a URI that the operator allows"
        )
    return LoadRequest(caller.tenant_id, name, source, caller.who, pinned, traffic_weight, description)


def compose_request(
    caller: Principal,
    name: str,
    composition: Combination,
    pinned: bool | None = None,
    traffic_weight: float | None = None,
    description: str | None = None,
) -> LoadRequest:
    """The same for a combination of adapters that the caller may use. Raises ManagementRefused, InvalidRequest."""
    check_settings(caller, pinned, traffic_weight, description)
    return LoadRequest(caller.tenant_id, name, composition.source, caller.who, pinned, traffic_weight, description)


def check_settings(
    caller: Principal, pinned: bool | None, traffic_weight: float | None, description: str | None = None
) -> None:
    """Raises ManagementRefused if a project says how much of everybody's memory its adapters take, and InvalidRequest
    for a description with an API key: the audit, events and lists have it.
    """
    if holds_key(description or ""):
        raise InvalidRequest("the description holds an API key; leave it out", param="description")
    if caller.kind == "project" and (pinned or traffic_weight is not None):
        raise ManagementRefused("adapters are pinned and weighted by the operator, with an admin key")


def handle_principal() -> Principal:
    """Another Ray job, through the deployment's handle."""
    return Principal(DEFAULT_TENANT, "handle")


def batch_principal(tenant: Tenant, key_id: str, batch_id: str) -> Principal:
    """Whose the requests of a batch are."""
    kind: Literal["open", "project"] = "open" if tenant.id == DEFAULT_TENANT else "project"
    return Principal(tenant.id, f"{key_id or 'nobody'}, {batch_id}", tenant, key_id, kind, is_batch=True)


def address_of(request: HTTPConnection) -> str:
    """Where a request came from. A proxy that is not ours may let clients write what they like for an address."""
    try:
        return f"http {ipaddress.ip_address(request.client.host)}" if request.client else "http"
    except ValueError:
        return "http, from no address"


def visible(registry: RegistryView, caller: Principal, name: str) -> Entry | None:
    """What a name means to a caller; None also for another tenant's."""
    found = (registry.find(name, owner_id) for owner_id in caller.owners(name))
    return next((entry for entry in found if entry is not None), None)


def visible_page(registry: RegistryView, caller: Principal, *, limit: int, after: str | None) -> Page:
    """Up to `limit` adapters and aliases that a caller may use, by name; each name once, as `visible` finds it."""
    kinds = (CatalogEntry, AliasEntry)
    names = {name for _, name in caller.tenant.shared if after is None or name > after}
    owners, has_more, horizon = {caller.tenant_id, DEFAULT_TENANT}, False, None
    for owner_id in owners:
        page = registry.page(kinds, limit=limit, after=after, tenant_id=owner_id)
        names.update(entry.name for entry in page.entries)
        if page.has_more:  # names behind its last are not known, and must not come before them
            last = page.entries[-1].name if page.entries else after or ""
            horizon = last if horizon is None else min(horizon, last)
            has_more = True
    listed = [name for name in sorted(names) if horizon is None or name <= horizon]
    entries = [entry for name in listed if (entry := visible(registry, caller, name)) is not None]
    return Page(tuple(entries[:limit]), has_more or len(entries) > limit)
