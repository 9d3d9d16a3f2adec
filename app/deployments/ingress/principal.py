"""The principal of a request: its tenant, key and rights.

Authentication stores a `Principal` in the request's state; everything behind it receives the tenant explicitly. Without
API keys all callers are one tenant, whose adapters stay public once keys exist.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Literal, NamedTuple

from starlette.requests import HTTPConnection

from app.config import AdaptersConfig
from app.deployments.ingress.error_responses import ManagementRefused, WrongKeyKind
from app.deployments.registry.feed.view import Entry, Page, RegistryView
from app.deployments.registry.models import DEFAULT_TENANT, UPLOADED, AliasEntry, CatalogEntry, LoadRequest, model_id
from app.deployments.store.sources.source_patterns import check_project_source
from app.deployments.tenancy.models import PUBLIC, Role, Tenant
from app.deployments.tenancy.quota.rate_limiter import Reservation
from app.engine.adapters.combining.combination import Combination, is_combination
from app.engine.errors import InvalidRequest, UnsafeSource
from app.redaction import holds_key

#: Key of the caller in the request's state.
STATE = "caller"
#: Events that a tenant's own calls cause. Other events may come from another tenant that has the same contents.
OWN_EVENTS = frozenset({
    "requested", "routable", "failed", "registered", "registered lazily", "draining", "removed",
    "put alias", "promote alias", "roll back alias", "remove alias",
})  # fmt: skip


class Principal(NamedTuple):
    """`who` is written to the audit log.

    `kind`: "open" without a key, "project" with a project's key, "operator" with the management token (manages
    adapters), "admin" with an admin key (also manages adapters, those of `tenant_id`). `is_batch`: a line of a batch
    job. `role`: of a project's key. `reservation`: what the arrival of its HTTP request reserved.
    """

    tenant_id: str
    who: str
    tenant: Tenant = PUBLIC
    key_id: str = ""
    kind: Literal["open", "project", "operator", "admin"] = "open"
    is_batch: bool = False
    reservation: Reservation | None = None
    role: Role = "member"

    def owners(self, name: str) -> Iterator[str]:
        """The tenants whose names are searched for this one, in order: the caller, tenants that share it, the
        public."""
        shared = self.tenant.shared
        sharing = [owner_id for owner_id, each in sorted(shared) if each == name] if shared else []
        for owner_id in dict.fromkeys((self.tenant_id, *sharing, DEFAULT_TENANT)):
            if self.tenant.may_use(model_id(owner_id, name)):
                yield owner_id


def http_principal(request: HTTPConnection) -> Principal:
    """The authenticated caller of an HTTP request."""
    caller: Principal = request.scope["state"][STATE]
    return caller


def inference_principal(request: HTTPConnection) -> Principal:
    """The caller of an inference route. Raises WrongKeyKind for management keys."""
    caller = http_principal(request)
    if caller.kind in ("operator", "admin") or caller.role == "management":
        raise WrongKeyKind(
            "this key is for management, not for inference; use a project's key with the role member or inference"
        )
    return caller


def admin_principal(request: HTTPConnection) -> Principal:
    """The caller of an admin route. Raises WrongKeyKind for all but admin keys."""
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
    defaults: str | None = None,
    *,
    adapters: AdaptersConfig,
) -> LoadRequest:
    """The store's request for loading an adapter. Raises UnsafeSource, ManagementRefused, InvalidRequest.

    A project may use only folders below `<root>/<project id>/`, and what `adapters.urls` and `adapters.hub` have for
    it; others are the operator's or another project's.
    """
    check_settings(caller, pinned, traffic_weight, description, defaults)
    if source.startswith("file:///"):  # Dynamo's spelling of a path
        source = source.removeprefix("file://")
    if holds_key(source):  # sources are shown in the audit log and in events
        raise UnsafeSource("the adapter's path contains an API key; remove it")
    if is_combination(source):  # only this module may make one, from adapters that the caller may use
        raise UnsafeSource(f"{source[:80]!r} is not a path; POST /v1/loras with combine registers a combination")
    if source.startswith(UPLOADED):  # only the service makes these; it does not name the owner
        raise UnsafeSource(f"{source[:80]!r} is not a path; PUT /v1/loras/{{name}}/weights uploads an adapter")
    if caller.kind == "project" and "://" not in source and not source.startswith(f"{caller.tenant_id}/"):
        raise UnsafeSource(
            f"{source[:80]!r} is outside this project's folder {caller.tenant_id}/; use a path below it or "
            "a URI that the operator allows"
        )
    if caller.kind == "project" and "://" in source:
        check_project_source(adapters, caller.tenant_id, source)
    return LoadRequest(caller.tenant_id, name, source, caller.who, pinned, traffic_weight, description, defaults)


def compose_request(
    caller: Principal,
    name: str,
    combination: Combination,
    pinned: bool | None = None,
    traffic_weight: float | None = None,
    description: str | None = None,
    defaults: str | None = None,
) -> LoadRequest:
    """`load_request` for a combination of adapters that the caller may use. Raises ManagementRefused,
    InvalidRequest."""
    check_settings(caller, pinned, traffic_weight, description, defaults)
    source = combination.source
    return LoadRequest(caller.tenant_id, name, source, caller.who, pinned, traffic_weight, description, defaults)


def check_settings(
    caller: Principal,
    pinned: bool | None,
    traffic_weight: float | None,
    description: str | None = None,
    defaults: str | None = None,
) -> None:
    """Raises ManagementRefused if a project sets pins or weights, which affect shared memory, and InvalidRequest for a
    description or defaults with an API key, because the audit log, events and lists show them."""
    if holds_key(description or ""):
        raise InvalidRequest("the description contains an API key; remove it", param="description")
    if holds_key(defaults or ""):
        raise InvalidRequest("the defaults contain an API key; remove it", param="defaults")
    if caller.kind == "project" and (pinned or traffic_weight is not None):
        raise ManagementRefused("only the operator may pin adapters or set traffic weights, with an admin key")


def handle_principal() -> Principal:
    """The caller of a Python handle: the default tenant."""
    return Principal(DEFAULT_TENANT, "handle")


def batch_principal(tenant: Tenant, key_id: str, batch_id: str) -> Principal:
    """The caller of a batch's requests."""
    kind: Literal["open", "project"] = "open" if tenant.id == DEFAULT_TENANT else "project"
    return Principal(tenant.id, f"{key_id or 'no key'}, {batch_id}", tenant, key_id, kind, is_batch=True)


def address_of(request: HTTPConnection) -> str:
    """The client's address for the audit log. A foreign proxy may forward anything as an address."""
    try:
        return f"http {ipaddress.ip_address(request.client.host)}" if request.client else "http"
    except ValueError:
        return "http, unknown address"


def visible(registry: RegistryView, caller: Principal, name: str) -> Entry | None:
    """The entry a caller gets for a name; None if there is none that it may use."""
    entries = (registry.find(name, owner_id) for owner_id in caller.owners(name))
    return next((entry for entry in entries if entry is not None), None)


def visible_events(caller: Principal) -> frozenset[str] | None:
    """The events of its tenant that a caller may see, None for all."""
    return OWN_EVENTS if caller.kind == "project" else None


def visible_page(registry: RegistryView, caller: Principal, *, limit: int, after: str | None) -> Page:
    """Up to `limit` adapters and aliases that a caller may use, by name; each name once, as `visible` resolves it."""
    kinds = (CatalogEntry, AliasEntry)
    names = {name for _, name in caller.tenant.shared if after is None or name > after}
    owners, has_more, horizon = {caller.tenant_id, DEFAULT_TENANT}, False, None
    for owner_id in owners:
        page = registry.page(kinds, limit=limit, after=after, tenant_id=owner_id)
        names.update(entry.name for entry in page.entries)
        if page.has_more:  # this owner's next names are unknown, so nothing beyond its last may be listed
            last = page.entries[-1].name if page.entries else after or ""
            horizon = last if horizon is None else min(horizon, last)
            has_more = True
    listed = [name for name in sorted(names) if horizon is None or name <= horizon]
    entries = [entry for name in listed if (entry := visible(registry, caller, name)) is not None]
    return Page(tuple(entries[:limit]), has_more or len(entries) > limit)
