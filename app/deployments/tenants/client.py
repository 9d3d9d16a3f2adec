"""How every ingress asks the owner of tenants: a typed method per call.

In: the actor that the owner lives in. Out: what `TenantsService` answers, or the exception that it raised. Every method
has the name and the signature of the service's; mypy checks each call against it. All of them raise ActorAway (a
NotReady) while the actor restarts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.deployments.links.published import Changes, Version
from app.deployments.links.ray_calls import Callee
from app.deployments.tenants.adapter_book import Activity, ActivityKey, Seen
from app.deployments.tenants.entries import (
    ApiKey,
    IssuedKey,
    ServiceAccount,
    Tenant,
    TenantChange,
    TenantKey,
    TenantRow,
)
from app.deployments.tenants.lending import Grant, Want
from app.deployments.tenants.limits import Meter
from app.deployments.tenants.metering import Row
from app.deployments.tenants.service import TenantsService as _Service
from app.deployments.tenants.usage import Bucket, UsageQuery
from app.engine.adapters.card import AdapterRef


class TenantsClient:
    """Several may share an actor."""

    def __init__(self, owner: Callee) -> None:
        self._owner = owner

    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[TenantKey, TenantRow]] | None:
        return await self._owner.call(_Service.watch, held, watcher_id, timeout_s)

    async def create_project(self, name: str, *, actor: str) -> Tenant:
        return await self._owner.call(_Service.create_project, name, actor=actor)

    async def rename_project(self, project_id: str, name: str, *, actor: str) -> Tenant:
        return await self._owner.call(_Service.rename_project, project_id, name, actor=actor)

    async def archive_project(self, project_id: str, *, actor: str) -> Tenant:
        return await self._owner.call(_Service.archive_project, project_id, actor=actor)

    async def configure_project(self, project_id: str, settings: Mapping[str, Any], *, actor: str) -> Tenant:
        return await self._owner.call(_Service.configure_project, project_id, settings, actor=actor)

    async def rotate_salt(self, project_id: str, *, actor: str) -> Tenant:
        return await self._owner.call(_Service.rotate_salt, project_id, actor=actor)

    async def permit_models(self, project_id: str, mode: str | None, model_ids: Sequence[str], *, actor: str) -> Tenant:
        return await self._owner.call(_Service.permit_models, project_id, mode, model_ids, actor=actor)

    async def limit_rates(self, project_id: str, model: str, changes: Mapping[str, int], *, actor: str) -> Tenant:
        return await self._owner.call(_Service.limit_rates, project_id, model, changes, actor=actor)

    async def limit_spend(self, project_id: str, cents: int | None, *, actor: str) -> Tenant:
        return await self._owner.call(_Service.limit_spend, project_id, cents, actor=actor)

    async def share(self, owner_id: str, name: str, project_ids: Sequence[str], *, actor: str) -> None:
        return await self._owner.call(_Service.share, owner_id, name, project_ids, actor=actor)

    async def shares(self, owner_id: str) -> dict[str, list[str]]:
        return await self._owner.call(_Service.shares, owner_id)

    async def project(self, project_id: str) -> Tenant:
        return await self._owner.call(_Service.project, project_id)

    async def projects(self, limit: int, after: str | None, *, with_archived: bool) -> list[Tenant]:
        return await self._owner.call(_Service.projects, limit, after, with_archived=with_archived)

    async def create_account(
        self, project_id: str, name: str, *, with_key: bool, expires_in_s: int | None, actor: str
    ) -> tuple[ServiceAccount, IssuedKey | None]:
        return await self._owner.call(
            _Service.create_account, project_id, name, with_key=with_key, expires_in_s=expires_in_s, actor=actor
        )

    async def update_account(self, project_id: str, account_id: str, *, name: str, actor: str) -> ServiceAccount:
        return await self._owner.call(_Service.update_account, project_id, account_id, name=name, actor=actor)

    async def delete_account(self, project_id: str, account_id: str, *, actor: str) -> None:
        return await self._owner.call(_Service.delete_account, project_id, account_id, actor=actor)

    async def account(self, project_id: str, account_id: str) -> ServiceAccount:
        return await self._owner.call(_Service.account, project_id, account_id)

    async def accounts(self, project_id: str, limit: int, after: str | None) -> list[ServiceAccount]:
        return await self._owner.call(_Service.accounts, project_id, limit, after)

    async def create_key(
        self, project_id: str, account_id: str, name: str, expires_in_s: int | None, *, actor: str
    ) -> IssuedKey:
        return await self._owner.call(_Service.create_key, project_id, account_id, name, expires_in_s, actor=actor)

    async def create_admin_key(self, name: str, expires_in_s: int | None, *, actor: str) -> IssuedKey:
        return await self._owner.call(_Service.create_admin_key, name, expires_in_s, actor=actor)

    async def expire_key(self, project_id: str, key_id: str, expires_in_s: int, *, actor: str) -> ApiKey:
        return await self._owner.call(_Service.expire_key, project_id, key_id, expires_in_s, actor=actor)

    async def revoke_key(self, project_id: str | None, key_id: str, *, actor: str) -> ApiKey:
        return await self._owner.call(_Service.revoke_key, project_id, key_id, actor=actor)

    async def key(self, project_id: str | None, key_id: str) -> ApiKey:
        return await self._owner.call(_Service.key, project_id, key_id)

    async def keys(
        self, project_id: str | None, limit: int, after: str | None, *, is_newest_first: bool = False
    ) -> list[ApiKey]:
        return await self._owner.call(_Service.keys, project_id, limit, after, is_newest_first=is_newest_first)

    async def note_use(self, used_s: Mapping[str, float]) -> None:
        return await self._owner.call(_Service.note_use, used_s)

    async def changes(
        self, limit: int, *, before: int | None, after: int | None, project_ids: Sequence[str], events: Sequence[str]
    ) -> list[TenantChange]:
        return await self._owner.call(
            _Service.changes, limit, before=before, after=after, project_ids=project_ids, events=events
        )

    async def lend(self, holder: str, wants: Sequence[Want]) -> list[Grant]:
        """Tell what an ingress holds of limits, and get what the owner lends it: a grant for each want."""
        return await self._owner.call(_Service.lend, holder, wants)

    async def left(self, project_id: str) -> list[tuple[Meter, int, int]]:
        """Each limit of a project, and how much of it is neither used nor lent to an ingress."""
        return await self._owner.call(_Service.left, project_id)

    async def remaining_spend(self, project_id: str) -> int | None:
        """Nanos that a project has left this month; None if nobody has asked for any since the owner began."""
        return await self._owner.call(_Service.remaining_spend, project_id)

    async def record(self, writer_id: str, number: int, rows: Sequence[Row]) -> None:
        """Write a batch of usage down, once however often it is sent."""
        await self._owner.call(_Service.record, writer_id, number, rows)

    async def note_activity(self, rows: Sequence[tuple[ActivityKey, Activity]]) -> None:
        """What an ingress has seen of adapters' requests since it last told."""
        await self._owner.call(_Service.note_activity, rows)

    async def seen(self, ref: AdapterRef, *, tenant_id: str | None) -> Seen:
        """What is known of an adapter: of one tenant's requests for it, or (None) of everybody's."""
        return await self._owner.call(_Service.seen, ref, tenant_id=tenant_id)

    async def usage(self, query: UsageQuery) -> list[Bucket]:
        """What was used, by buckets of time."""
        return await self._owner.call(_Service.usage, query)
