"""Request and response bodies of OpenAI's admin API, usage and costs included, and of /v1/tenants."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import ConfigDict, Field

from app.deployments.ingress.schemas.openai import Count
from app.deployments.ingress.schemas.request_model import Body
from app.deployments.ingress.schemas.response_model import DeletedResponse, ResponseModel, Seconds
from app.deployments.tenancy.models import Role


class ProjectBody(Body):
    """OpenAI's `external_key_id`, `geography` and `residency` are not supported; null is accepted."""

    name: str


class AccountBody(Body):
    """A new service account, with a first key unless `create_service_account_only`. `role`, which OpenAI's client does
    not have here, says what its keys may do: infer and manage the project's adapters (member), or one of both.
    """

    name: str
    create_service_account_only: bool = False
    expires_in_seconds: Count | None = None
    role: Role = "member"


class AccountUpdateBody(Body):
    """Omitted fields stay unchanged; a role applies to all keys of the account at once."""

    name: str | None = None
    role: Role | None = None


class KeyBody(Body):
    """A new key of a service account; without `expires_in_seconds` it does not expire."""

    name: str = "Secret Key"
    expires_in_seconds: Count | None = None


class KeyUpdateBody(Body):
    """Lets a key expire, counted from now, for key rotation."""

    expires_in_seconds: Count


class AdminKeyBody(Body):
    """A new admin key; without `expires_in_seconds` it does not expire."""

    name: str
    expires_in_seconds: Count | None = None


class ModelsBody(Body):
    """The models, adapters and aliases that a project may use or may not use."""

    mode: Literal["allow_list", "deny_list"]
    model_ids: list[str]


class RateLimitBody(Body):
    """Omitted limits stay unchanged. OpenAI's limits of images, audio and batches are not supported."""

    max_requests_per_1_minute: int | None = Field(default=None, ge=0)
    max_tokens_per_1_minute: int | None = Field(default=None, ge=0)
    max_requests_per_1_day: int | None = Field(default=None, ge=0)


class SpendLimitBody(Body):
    """The spend limit of a project per calendar month (UTC); `threshold_amount` is in cents."""

    threshold_amount: int = Field(ge=0, lt=2**53)
    currency: Literal["USD"]
    interval: Literal["month"]


class TenantBody(Body):
    """Settings of a project that OpenAI's objects do not have; omitted ones stay unchanged, -1 removes a limit.

    hub_token: reads this project's adapters from the hub in place of the service's token; stored encrypted and never
    returned. "" removes it.
    """

    weight: float | None = None
    enforce: bool | None = None
    max_concurrent: int | None = Field(default=None, ge=-1, lt=2**31)
    max_adapters: int | None = Field(default=None, ge=-1, lt=2**31)
    max_adapter_bytes: int | None = Field(default=None, ge=-1, lt=2**53)
    calls_per_min: int | None = Field(default=None, ge=-1, lt=2**31)
    hub_token: str | None = Field(default=None, repr=False)


class ShareBody(Body):
    """The complete list of projects that may use one of this project's names."""

    project_ids: list[str] = Field(max_length=1000)


class Project(ResponseModel):
    object: Literal["organization.project"]
    id: str
    name: str
    created_at: Seconds
    archived_at: Seconds | None
    status: Literal["active", "archived"]
    external_key_id: None


class KeyAccount(ResponseModel):
    id: str
    name: str
    role: str
    created_at: Seconds


class ServiceAccountResponse(KeyAccount):
    object: Literal["organization.project.service_account"]


class IssuedKeyResponse(ResponseModel):
    """A new key, the only response with its value."""

    object: Literal["organization.project.service_account.api_key"]
    id: str
    name: str
    value: str
    created_at: Seconds
    expires_at: Seconds | None


class NewServiceAccount(ServiceAccountResponse):
    api_key: IssuedKeyResponse | None


class DeletedKeys(DeletedResponse):
    """`ended_batches`: the batches of the revoked keys that had not ended; their remaining lines are refused."""

    ended_batches: list[str]


class KeyOwner(ResponseModel):
    type: Literal["service_account"]
    service_account: KeyAccount | None


class _KeyFields(ResponseModel):
    id: str
    name: str
    redacted_value: str
    created_at: Seconds
    expires_at: Seconds | None
    last_used_at: Seconds | None


class ApiKeyResponse(_KeyFields):
    object: Literal["organization.project.api_key"]
    owner: KeyOwner
    owner_project_access: Literal["active"]


class AdminKeyOwner(ResponseModel):
    type: Literal["user"]
    object: Literal["organization.user"]
    id: str
    name: str
    role: str


class AdminKey(_KeyFields):
    object: Literal["organization.admin_api_key"]
    owner: AdminKeyOwner


class NewAdminKey(AdminKey):
    value: str


class ModelPermissions(ResponseModel):
    object: Literal["project.model_permissions"]
    mode: Literal["allow_list", "deny_list"]
    model_ids: list[str]


class DeletedSetting(ResponseModel):
    object: str
    deleted: Literal[True]


class ProjectRateLimit(ResponseModel):
    """2147483647 means unlimited."""

    object: Literal["project.rate_limit"]
    id: str
    model: str
    max_requests_per_1_minute: int
    max_tokens_per_1_minute: int
    max_requests_per_1_day: int


class Enforcement(ResponseModel):
    status: Literal["enforcing", "inactive"]


class SpendLimit(ResponseModel):
    object: Literal["project.spend_limit"]
    threshold_amount: int
    currency: Literal["USD"]
    interval: Literal["month"]
    enforcement: Enforcement


class TenantLimit(ResponseModel):
    """`model` is null for a limit of all models together."""

    kind: str
    model: str | None
    limit: int
    remaining: int


class TenantDetails(ResponseModel):
    object: Literal["polylora.tenant"]
    id: str
    name: str
    weight: float
    enforce: bool
    max_concurrent: int | None
    max_adapters: int | None
    max_adapter_bytes: int | None
    calls_per_min: int | None
    has_hub_token: bool
    shares: dict[str, list[str]]
    limits: list[TenantLimit]


class AuditActorKey(ResponseModel):
    id: str
    type: Literal["user"]


class AuditActor(ResponseModel):
    type: Literal["api_key"]
    api_key: AuditActorKey


class AuditProject(ResponseModel):
    id: str
    name: str


class AuditLog(ResponseModel):
    """One more field is named like the event's type and has the change."""

    model_config = ConfigDict(extra="allow")

    object: Literal["organization.audit_log"]
    id: str
    type: str
    effective_at: Seconds
    actor: AuditActor
    project: AuditProject | None


ResultT = TypeVar("ResultT", bound=ResponseModel)


class CompletionsUsage(ResponseModel):
    """Columns that are not grouped by are null. Beside OpenAI's fields: what adapters' loads to devices, rank rows and
    KV blocks took."""

    object: Literal["organization.usage.completions.result"]
    project_id: str | None
    api_key_id: str | None
    model: str | None
    user_id: None
    input_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    output_tokens: int
    num_model_requests: int
    num_adapter_loads: int
    adapter_load_bytes: int
    rank_row_seconds: float
    kv_block_seconds: float
    batch: None
    service_tier: None


class EmbeddingsUsage(ResponseModel):
    """Columns that are not grouped by are null."""

    object: Literal["organization.usage.embeddings.result"]
    project_id: str | None
    api_key_id: str | None
    model: str | None
    user_id: None
    input_tokens: int
    num_model_requests: int


class Amount(ResponseModel):
    value: float
    currency: Literal["usd"]


class CostsResponse(ResponseModel):
    """Only line items have a `quantity`."""

    object: Literal["organization.costs.result"]
    amount: Amount
    line_item: str | None
    quantity: float | None
    quantity_unit: Literal["tokens"] | None
    project_id: str | None
    api_key_id: str | None


class UsageBucketResponse(ResponseModel, Generic[ResultT]):
    object: Literal["bucket"]
    start_time: Seconds
    end_time: Seconds
    results: list[ResultT]


class BucketPage(ResponseModel, Generic[ResultT]):
    """A page of buckets; `next_page` is the `page` of the next request."""

    object: Literal["page"]
    data: list[UsageBucketResponse[ResultT]]
    has_more: bool
    next_page: str | None
