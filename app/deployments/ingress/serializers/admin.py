"""Tenants in the format of OpenAI's admin API. A key's value appears only in the response that creates it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.deployments.ingress.serializers.loras import whole_seconds
from app.deployments.tenancy.models import UNLIMITED, ApiKey, IssuedKey, RateLimit, ServiceAccount, Tenant, TenantChange
from app.deployments.tenancy.quota.limits import LimitKey


def project_body(tenant: Tenant) -> dict[str, Any]:
    return {
        "object": "organization.project",
        "id": tenant.id,
        "name": tenant.name,
        "created_at": int(tenant.created_s),
        "archived_at": whole_seconds(tenant.archived_s),
        "status": "active" if tenant.archived_s is None else "archived",
        "external_key_id": None,
    }


def account_body(account: ServiceAccount) -> dict[str, Any]:
    return {
        "object": "organization.project.service_account",
        "id": account.id,
        "name": account.name,
        "role": account.role,
        "created_at": int(account.created_s),
    }


def issued_body(issued: IssuedKey) -> dict[str, Any]:
    """A service account's new key, with its value."""
    return {
        "object": "organization.project.service_account.api_key",
        "id": issued.key.id,
        "name": issued.key.name,
        "value": issued.value,
        "created_at": int(issued.key.created_s),
        "expires_at": whole_seconds(issued.key.expires_s),
    }


def key_body(key: ApiKey, account: ServiceAccount | None) -> dict[str, Any]:
    owner = None
    if account is not None:
        owner = account_body(account)
        del owner["object"]
    return {
        "object": "organization.project.api_key",
        "id": key.id,
        "name": key.name,
        "redacted_value": key.redacted,
        "created_at": int(key.created_s),
        "expires_at": whole_seconds(key.expires_s),
        "last_used_at": whole_seconds(key.last_used_s),
        "owner": {"type": "service_account", "service_account": owner},
        "owner_project_access": "active",
    }


def admin_key_body(key: ApiKey) -> dict[str, Any]:
    return {
        "object": "organization.admin_api_key",
        "id": key.id,
        "name": key.name,
        "redacted_value": key.redacted,
        "created_at": int(key.created_s),
        "expires_at": whole_seconds(key.expires_s),
        "last_used_at": whole_seconds(key.last_used_s),
        "owner": {"type": "user", "object": "organization.user", "id": "operator", "name": "operator", "role": "owner"},
    }


def models_body(tenant: Tenant) -> dict[str, Any]:
    """A project without permissions may use everything that it sees: an empty deny list."""
    return {
        "object": "project.model_permissions",
        "mode": tenant.model_mode or "deny_list",
        "model_ids": sorted(tenant.model_ids),
    }


def rate_limit_body(model: str, rate: RateLimit) -> dict[str, Any]:
    limits = {
        "max_requests_per_1_minute": rate.requests_per_min,
        "max_tokens_per_1_minute": rate.tokens_per_min,
        "max_requests_per_1_day": rate.requests_per_day,
    }
    return {
        "object": "project.rate_limit",
        "id": f"rl-{model}",
        "model": model,
        **{name: UNLIMITED if limit is None else limit for name, limit in limits.items()},
    }


def spend_limit_body(cents: int, *, is_reached: bool) -> dict[str, Any]:
    return {
        "object": "project.spend_limit",
        "threshold_amount": cents,
        "currency": "USD",
        "interval": "month",
        "enforcement": {"status": "enforcing" if is_reached else "inactive"},
    }


def tenant_body(
    tenant: Tenant, shares: dict[str, list[str]], limits_left: Sequence[tuple[LimitKey, int, int]]
) -> dict[str, Any]:
    """`limits_left`: (limit, its amount, remaining); the difference is used or reserved by requests and ingresses."""
    limits = [
        {"kind": key.kind, "model": key.model or None, "limit": limit, "remaining": remaining}
        for key, limit, remaining in limits_left
    ]
    return {
        "object": "polylora.tenant",
        "id": tenant.id,
        "name": tenant.name,
        "weight": tenant.weight,
        "enforce": tenant.enforce,
        "max_concurrent": tenant.limits.max_concurrent,
        "max_adapters": tenant.limits.max_adapters,
        "max_adapter_bytes": tenant.limits.max_adapter_bytes,
        "calls_per_min": tenant.limits.calls_per_min,
        "has_hub_token": tenant.has_hub_token,
        "shares": shares,
        "limits": limits,
    }


def audit_body(change: TenantChange) -> dict[str, Any]:
    """An entry of the audit log. Like OpenAI's, it has the change in a field that is named like the event."""
    detail = json.loads(change.detail)
    project = None if change.project_id is None else {"id": change.project_id, "name": change.project_id}
    return {
        "object": "organization.audit_log",
        "id": f"audit_log-{change.id}",
        "type": change.event,
        "effective_at": int(change.time_s),
        "actor": {"type": "api_key", "api_key": {"id": change.actor, "type": "user"}},
        "project": project,
        change.event: {"id": change.target, "changes_requested": detail},
    }
