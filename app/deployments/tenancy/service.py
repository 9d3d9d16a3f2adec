"""The tenant service, without Ray: projects, keys, limits and usage, next to the registry in the store's process.

Ingresses call it through an `actor_proxy`. It publishes a table of tenants and keys, so no request waits for it. When a
call returns, every ingress knows what it changed; changes by other processes of the same database arrive within
`SYNC_INTERVAL_S`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from app.deployments.rpc.actor_proxy import remote_method
from app.deployments.rpc.background_tasks import Tasks
from app.deployments.rpc.long_poll_host import Changes, LongPollTable, Version
from app.deployments.tenancy.models import (
    NO_LIMITS,
    ApiKey,
    IssuedKey,
    Role,
    ServiceAccount,
    Tenant,
    TenantChange,
    TenantKey,
    TenantLimits,
    TenantRow,
)
from app.deployments.tenancy.quota.leases import LeaseGrant, LeaseRequest, QuotaService
from app.deployments.tenancy.quota.limits import LimitKey, limit_of, monotonic_unix_clock
from app.deployments.tenancy.usage.adapter_stats import Activity, ActivityKey, ActivityStats, AdapterStatsTable
from app.deployments.tenancy.usage.flusher import Row
from app.deployments.tenancy.usage.queries import UsageBucket, UsageQuery
from app.deployments.tenancy.usage.tenant_throughput import TenantThroughput
from app.engine.adapters.card import AdapterRef
from app.engine.errors import NotReady

if TYPE_CHECKING:  # a database: a process that only calls the owner starts without
    from app.deployments.tenancy.tenant_store import TenantStore

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: How long a change waits until every ingress has it.
SETTLE_TIMEOUT_S = 5.0
#: How often the database is checked for changes by other processes.
SYNC_INTERVAL_S = 2.0


class TenantsService:
    """One event loop; the database is called in threads.

    `on_watch` is called whenever a process asks for the table; `clock` gives Unix time, `monotonic` seconds that no
    change of the clock moves. `adapters`: statistics shared with other parts of the process.
    """

    def __init__(
        self,
        store: TenantStore,
        on_watch: Callable[[], None],
        clock: Callable[[], float] = time.time,
        adapters: AdapterStatsTable | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._adapters = adapters or AdapterStatsTable(clock)
        self.throughput = TenantThroughput(self._weight, monotonic)
        self._session_secret = secrets.token_bytes(32)
        self._store = store
        self._clock = monotonic_unix_clock(clock, monotonic)
        self._quota_service = QuotaService(self._tenant, store.ledger)
        self._on_watch = on_watch
        self._changing = asyncio.Lock()  # the database and the table change in the same order
        self._revision = -1
        self._rows: dict[TenantKey, TenantRow] = {}
        self._tasks = Tasks()
        self.table: LongPollTable[TenantKey, TenantRow] = LongPollTable(time.monotonic)

    @remote_method
    async def watch(
        self, known: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[TenantKey, TenantRow]] | None:
        self._on_watch()
        if self._revision < 0:
            async with self._changing:
                await self._sync()
        if not len(self._tasks):
            self._tasks.start(self._sync_loop())
        return await self.table.newer(known, watcher_id, timeout_s)

    @remote_method
    async def session_secret(self) -> bytes:
        """What ingresses sign the console's sessions with, the same for all of them. It is only in this process's
        memory: whoever reads the database cannot make sessions, and they end when this process does."""
        return self._session_secret

    @remote_method
    async def create_project(self, name: str, *, actor: str, limits: TenantLimits = NO_LIMITS) -> Tenant:
        return await self._change(lambda: self._store.projects.create(name, actor=actor, limits=limits))

    @remote_method
    async def rename_project(self, project_id: str, name: str, *, actor: str) -> Tenant:
        return await self._change(lambda: self._store.projects.rename(project_id, name, actor=actor))

    @remote_method
    async def archive_project(self, project_id: str, *, actor: str) -> Tenant:
        return await self._change(lambda: self._store.projects.archive(project_id, actor=actor))

    @remote_method
    async def configure_project(self, project_id: str, settings: Mapping[str, Any], *, actor: str) -> Tenant:
        return await self._change(lambda: self._store.projects.configure(project_id, settings, actor=actor))

    @remote_method
    async def rotate_salt(self, project_id: str, *, actor: str) -> Tenant:
        return await self._change(lambda: self._store.projects.rotate_salt(project_id, actor=actor))

    @remote_method
    async def permit_models(self, project_id: str, mode: str | None, model_ids: Sequence[str], *, actor: str) -> Tenant:
        return await self._change(lambda: self._store.projects.permit_models(project_id, mode, model_ids, actor=actor))

    @remote_method
    async def limit_rates(self, project_id: str, model: str, changes: Mapping[str, int], *, actor: str) -> Tenant:
        return await self._change(lambda: self._store.projects.limit_rates(project_id, model, changes, actor=actor))

    @remote_method
    async def limit_spend(self, project_id: str, cents: int | None, *, actor: str) -> Tenant:
        return await self._change(lambda: self._store.projects.limit_spend(project_id, cents, actor=actor))

    @remote_method
    async def share(self, owner_id: str, name: str, project_ids: Sequence[str], *, actor: str) -> None:
        await self._change(lambda: self._store.projects.share(owner_id, name, project_ids, actor=actor))

    @remote_method
    async def shares(self, owner_id: str) -> dict[str, list[str]]:
        return await asyncio.to_thread(self._store.projects.shares, owner_id)

    @remote_method
    async def project(self, project_id: str) -> Tenant:
        return await asyncio.to_thread(self._store.projects.get, project_id)

    @remote_method
    async def projects(self, limit: int, after: str | None, *, with_archived: bool) -> list[Tenant]:
        return await asyncio.to_thread(self._store.projects.page, limit, after, with_archived=with_archived)

    @remote_method
    async def create_account(
        self,
        project_id: str,
        name: str,
        *,
        with_key: bool,
        expires_in_s: int | None,
        role: Role = "member",
        actor: str,
    ) -> tuple[ServiceAccount, IssuedKey | None]:
        create = self._store.keys.create_account
        return await self._change(
            lambda: create(project_id, name, with_key=with_key, expires_in_s=expires_in_s, role=role, actor=actor)
        )

    @remote_method
    async def update_account(
        self, project_id: str, account_id: str, *, name: str | None, role: Role | None, actor: str
    ) -> ServiceAccount:
        update = self._store.keys.update_account
        account, _ = await self._change(lambda: update(project_id, account_id, name=name, role=role, actor=actor))
        return account

    @remote_method
    async def delete_account(self, project_id: str, account_id: str, *, actor: str) -> list[ApiKey]:
        return await self._change(lambda: self._store.keys.delete_account(project_id, account_id, actor=actor))

    @remote_method
    async def account(self, project_id: str, account_id: str) -> ServiceAccount:
        return await asyncio.to_thread(self._store.keys.account, project_id, account_id)

    @remote_method
    async def accounts(self, project_id: str, limit: int, after: str | None) -> list[ServiceAccount]:
        return await asyncio.to_thread(self._store.keys.accounts, project_id, limit, after)

    @remote_method
    async def create_key(
        self, project_id: str, account_id: str, name: str, expires_in_s: int | None, *, actor: str
    ) -> IssuedKey:
        create = self._store.keys.create_key
        return await self._change(lambda: create(project_id, account_id, name, expires_in_s, actor=actor))

    @remote_method
    async def create_admin_key(self, name: str, expires_in_s: int | None, *, actor: str) -> IssuedKey:
        return await self._change(lambda: self._store.keys.create_admin_key(name, expires_in_s, actor=actor))

    @remote_method
    async def expire_key(self, project_id: str, key_id: str, expires_in_s: int, *, actor: str) -> ApiKey:
        return await self._change(lambda: self._store.keys.expire_key(project_id, key_id, expires_in_s, actor=actor))

    @remote_method
    async def revoke_key(self, project_id: str | None, key_id: str, *, actor: str) -> ApiKey:
        return await self._change(lambda: self._store.keys.revoke_key(project_id, key_id, actor=actor))

    @remote_method
    async def key(self, project_id: str | None, key_id: str) -> ApiKey:
        return await asyncio.to_thread(self._store.keys.key, project_id, key_id)

    @remote_method
    async def keys(
        self, project_id: str | None, limit: int, after: str | None, *, is_newest_first: bool = False
    ) -> list[ApiKey]:
        keys = self._store.keys.keys
        return await asyncio.to_thread(keys, project_id, limit, after, is_newest_first=is_newest_first)

    @remote_method
    async def note_use(self, used_s: Mapping[str, float]) -> None:
        await asyncio.to_thread(self._store.keys.note_use, used_s)

    @remote_method
    async def changes(
        self,
        limit: int,
        *,
        before: int | None,
        after: int | None,
        project_ids: Sequence[str],
        events: Sequence[str],
        actors: Sequence[str] = (),
        targets: Sequence[str] = (),
        since_s: int | None = None,
        until_s: int | None = None,
    ) -> list[TenantChange]:
        return await asyncio.to_thread(
            self._store.changes,
            limit,
            before=before,
            after=after,
            project_ids=project_ids,
            events=events,
            actors=actors,
            targets=targets,
            since_s=since_s,
            until_s=until_s,
        )

    @remote_method
    async def lease(self, holder: str, requests: Sequence[LeaseRequest]) -> list[LeaseGrant]:
        """Report what an ingress holds of limits; returns a grant for each request."""
        return await self._quota_service.lease(holder, requests, self._clock())

    @remote_method
    async def remaining(self, project_id: str) -> list[tuple[LimitKey, int, int]]:
        """Each limit of a project, and how much of it is neither used nor leased to an ingress."""
        return await self._quota_service.remaining(project_id, self._clock())

    @remote_method
    async def remaining_spend(self, project_id: str) -> int | None:
        """Nanos that a project may still spend this month; None if no ingress has asked since the service started."""
        return self._quota_service.remaining_spend(project_id)

    @remote_method
    async def record(self, writer_id: str, number: int, rows: Sequence[Row]) -> None:
        """Record a batch of usage, once however often it is sent."""
        if await asyncio.to_thread(self._store.ledger.record, writer_id, number, rows):
            self.throughput.add(rows)
            for key, usage in rows:
                if usage.num_loads:
                    self._adapters.record_load("device", key.digest, usage.num_loads)

    @remote_method
    async def note_activity(self, rows: Sequence[tuple[ActivityKey, Activity]]) -> None:
        """Add an ingress's statistics of adapters since its last call."""
        self._adapters.add(rows)

    @remote_method
    async def adapter_stats(self, ref: AdapterRef, *, tenant_id: str | None) -> ActivityStats:
        """Statistics of an adapter: requests of one tenant, or (None) of all."""
        return self._adapters.stats(ref, tenant_id=tenant_id)

    @remote_method
    async def usage(self, query: UsageQuery) -> list[UsageBucket]:
        """Usage by time buckets."""
        return await asyncio.to_thread(self._store.ledger.buckets, query)

    def _weight(self, tenant_id: str) -> float:
        tenant = self._tenant(tenant_id)
        return 1.0 if tenant is None else tenant.weight

    def _tenant(self, tenant_id: str) -> Tenant | None:
        row = self._rows.get(("tenant", tenant_id))
        return row if isinstance(row, Tenant) else None

    async def _change(self, call: Callable[[], T]) -> T:
        """Change the database by `call`, in a thread, and publish the difference.

        The work is a task of its own: a cancelled caller must not leave the table behind the database.
        """

        def call_and_read_revision() -> tuple[T, int]:
            return call(), self._store.revision()

        async def change() -> T:
            async with self._changing:
                result, revision = await asyncio.to_thread(call_and_read_revision)
                if revision == self._revision + 1:  # no other process has changed anything
                    self._publish(_rows_of(result))
                    self._revision = revision
                else:
                    await self._sync()
            if not await self.table.wait_until_current(SETTLE_TIMEOUT_S):
                logger.warning("an ingress did not apply a change of the tenants within %g s", SETTLE_TIMEOUT_S)
            return result

        return await asyncio.shield(self._tasks.start(change()))

    async def _sync(self) -> None:
        """Publish what the table lacks, whoever wrote it. Called with `_changing` held."""

        def compare() -> tuple[int, dict[TenantKey, TenantRow | None]] | None:
            known = max(self._revision, 0)
            found = self._store.since(known)
            if found.revision == self._revision:
                return None
            rows = _rows_of([*found.tenants, *found.keys])
            changed: dict[TenantKey, TenantRow | None] = {}
            if found.revision < known:  # the database was replaced by an older copy
                changed |= dict.fromkeys(self._rows.keys() - rows.keys())
            changed |= {place: row for place, row in rows.items() if self._rows.get(place) != row}
            return found.revision, changed

        found = await asyncio.to_thread(compare)
        if found is not None:
            self._revision, changed = found
            self._publish(changed)

    def _publish(self, changed: Mapping[TenantKey, TenantRow | None]) -> None:
        for place, row in changed.items():
            before = self._rows.pop(place, None)
            if row is not None:
                self._rows[place] = row
            if isinstance(before, Tenant) and isinstance(row, Tenant) and not _counts_spend(before):
                self._quota_service.forget_spend(row.id)
        self.table.publish(changed)

    async def _sync_loop(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S)
            try:
                async with self._changing:
                    await self._sync()
                await self._quota_service.reconcile(self._clock())
            except NotReady as error:
                logger.warning("%s; keeping the tenants as they were", error)


def _counts_spend(tenant: Tenant) -> bool:
    """Whether all that a tenant spends is counted against a limit while it is spent."""
    return tenant.enforce and limit_of(tenant.limits, LimitKey(tenant.id, "spend")) is not None


def _rows_of(result: object) -> dict[TenantKey, TenantRow]:
    """The table rows that a call changed: all of them are in its result."""
    if isinstance(result, Tenant):
        return {("tenant", result.id): result}
    if isinstance(result, ApiKey):
        return {("key", result.digest): result}
    rows: dict[TenantKey, TenantRow] = {}
    if isinstance(result, list | tuple):
        for item in result:
            rows |= _rows_of(item)
    return rows
