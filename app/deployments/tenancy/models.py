"""Tenants, keys and accounts as immutable values that travel between processes.

A tenant is an OpenAI project, and its id is the tenant's id everywhere; times are Unix seconds. None of them holds a
key's secret except `IssuedKey`, the one answer to the key's creator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from app.deployments.registry.models import DEFAULT_TENANT, model_id
from app.engine.wire_format import message

#: Rights of a service account's keys: a "member" infers and manages its project's adapters, the others do one of both.
Role = Literal["member", "inference", "management"]
#: Default and largest page of lists of projects, keys and accounts.
DEFAULT_PAGE, LARGEST_PAGE = 20, 100
#: A rate limit of this number or more limits nothing: OpenAI's API and clients cannot say "none".
UNLIMITED = 2**31 - 1


@message
@dataclass(frozen=True, slots=True)
class RateLimit:
    """Rate limits of one model; None: unlimited."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    requests_per_day: int | None = None


@message
@dataclass(frozen=True, slots=True)
class TenantLimits:
    """`rates` by `model_id`: the base model's row covers everything, an adapter's row that adapter, in addition.

    `calls_per_min` covers what is not inference, and the bodies of all requests.
    """

    rates: Mapping[str, RateLimit] = field(default_factory=dict)
    max_concurrent: int | None = None
    max_adapters: int | None = None
    max_adapter_bytes: int | None = None
    spend_cents: int | None = None
    calls_per_min: int | None = None


NO_LIMITS = TenantLimits()


@message
@dataclass(frozen=True, slots=True)
class Tenant:
    """A project as every ingress knows it.

    `shared`: (owner, name) of other tenants' adapters that it may use. `enforce` False: limits reject nothing, they
    only count. `salt` separates its KV blocks from other tenants'.
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
    limits: TenantLimits = NO_LIMITS
    shared: frozenset[tuple[str, str]] = frozenset()
    has_hub_token: bool = False

    def may_use(self, model: str) -> bool:
        """Whether its model permissions allow this model, adapter or alias, by `model_id`.

        A bare name in an allow list is the base model's or a public one's; in a deny list it is denied whoever owns it.
        """
        if self.model_mode is None:
            return True
        if self.model_mode == "allow_list":
            return model in self.model_ids
        return self.model_ids.isdisjoint((model, model.rpartition(":")[2]))

    def listed_names(self, owner_id: str) -> set[str]:
        """The names of an owner's adapters and aliases that are in its list of permissions."""
        prefix = model_id(owner_id, "")
        names = {each.removeprefix(prefix) for each in self.model_ids if each.startswith(prefix)}
        if self.model_mode == "deny_list":
            names |= self.model_ids
        return {name for name in names if ":" not in name}


#: The tenant of all requests while there are no keys. What it owns stays available to all tenants afterwards.
PUBLIC = Tenant(DEFAULT_TENANT, "default", 0.0)


@message
@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as stored and published. `project_id` None: an admin key, which cannot run inference. `role` is its service
    account's."""

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
    role: Role = "member"

    @property
    def is_admin(self) -> bool:
        return self.project_id is None

    def is_valid(self, now_s: float) -> bool:
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)


@message
class IssuedKey(NamedTuple):
    """A new key with its value, which is shown only this once."""

    key: ApiKey
    value: str


@message
@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """The owner of keys within a project."""

    id: str
    project_id: str
    name: str
    role: str
    created_s: float


@message
@dataclass(frozen=True, slots=True)
class TenantChange:
    """One audit record: `event` is OpenAI's name for it, `actor` the id of the key that made the change."""

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
