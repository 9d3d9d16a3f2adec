"""What is known of tenants: frozen values, as they travel between processes.

In: rows of the database, read by the books. Out: projects, keys, accounts and changes, for ingresses and operators. A
tenant is an OpenAI project, and its id is the tenant's id everywhere else; times are Unix seconds. Rule: none of these
values holds a key's secret or a tenant's, except `IssuedKeyResponse`, which is the one answer to whoever made the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from app.deployments.registry.models import DEFAULT_TENANT
from app.engine.wire_format import message

#: What lists of projects, keys and accounts hold unless asked for another number, and at most.
DEFAULT_PAGE, LARGEST_PAGE = 20, 100


@message
@dataclass(frozen=True, slots=True)
class RateLimit:
    """What may be asked of one model; None: as much as one likes."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    requests_per_day: int | None = None


@message
@dataclass(frozen=True, slots=True)
class TenantLimits:
    """`rates` by model: the base's row holds for everything, an adapter's for it alone, beside that."""

    rates: Mapping[str, RateLimit] = field(default_factory=dict)
    max_concurrent: int | None = None
    max_adapters: int | None = None
    max_adapter_bytes: int | None = None
    spend_cents: int | None = None


@message
@dataclass(frozen=True, slots=True)
class Tenant:
    """A project as every ingress knows it.

    `shared` are (owner, name) of other tenants' adapters that it may use. `enforce` False: nothing is refused for its
    limits, and what would have been is counted. `salt` parts its KV blocks from everybody else's.
    """

    id: str
    name: str
    created_s: float
    archived_s: float | None = None
    weight: float = 1.0
    salt: bytes = b""
    enforce: bool = True
    model_mode: Literal["allow_list", "deny_list"] | None = None
    model_ids: frozenset[str] = frozenset()
    limits: TenantLimits = TenantLimits()
    shared: frozenset[tuple[str, str]] = frozenset()

    def may_use(self, model: str) -> bool:
        """Whether its operator lets it use this model, adapter or alias."""
        if self.model_mode is None:
            return True
        return (model in self.model_ids) == (self.model_mode == "allow_list")


#: Everybody, as long as there are no keys. What it owns is everybody's when there are.
PUBLIC = Tenant(DEFAULT_TENANT, "default", 0.0)


@message
@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is stored and published. `project_id` None: it administers, and infers nothing."""

    id: str
    digest: str
    redacted: str
    name: str
    created_s: float
    project_id: str | None = None
    service_account_id: str | None = None
    expires_s: float | None = None
    revoked_s: float | None = None
    last_used_s: float | None = None

    @property
    def is_admin(self) -> bool:
        return self.project_id is None

    def is_valid(self, now_s: float) -> bool:
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)


@message
class IssuedKey(NamedTuple):
    """A new key and its value: the only time that anybody learns it."""

    key: ApiKey
    value: str


@message
@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """Whose keys they are, within a project."""

    id: str
    project_id: str
    name: str
    role: str
    created_s: float


@message
@dataclass(frozen=True, slots=True)
class TenantChange:
    """One line of the audit: `event` in OpenAI's words, `actor` the id of the key that did it."""

    id: int
    event: str
    actor: str
    project_id: str | None
    target: str
    detail: str
    time_s: float


#: Rows of the published table: a tenant by ("tenant", id), a key by ("key", digest).
Kind = Literal["tenant", "key"]
TenantKey = tuple[Kind, str]
TenantRow = Tenant | ApiKey
