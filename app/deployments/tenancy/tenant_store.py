"""The tenant tables of the database: projects, keys, the ledger and the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import select

from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tenant_tables import tenant_audit, tenant_revisions
from app.deployments.tenancy.auth.api_key_store import ApiKeyStore
from app.deployments.tenancy.auth.project_store import ProjectStore
from app.deployments.tenancy.models import ApiKey, Tenant, TenantChange
from app.deployments.tenancy.usage.ledger import Ledger


class TenantChanges(NamedTuple):
    """Tenants and keys that changed, up to a revision."""

    revision: int
    tenants: Sequence[Tenant]
    keys: Sequence[ApiKey]


class TenantStore:
    """Thread-safe; each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.projects = ProjectStore(database)
        self.keys = ApiKeyStore(database)
        self.ledger = Ledger(database)

    def revision(self) -> int:
        """The number of changes so far, by any process."""
        place = tenant_revisions.c.base_digest == self._database.base_digest
        with self._database.read() as connection:
            return connection.scalar(select(tenant_revisions.c.number).where(place)) or 0

    def since(self, revision: int) -> TenantChanges:
        """Rows newer than a revision, as they are now; 0 gives all. Rows are never deleted."""
        place = tenant_revisions.c.base_digest == self._database.base_digest
        with self._database.read() as connection:
            number = connection.scalar(select(tenant_revisions.c.number).where(place)) or 0
            if number == revision:
                return TenantChanges(number, [], [])
            known = revision if revision < number else 0  # an older copy of the database: all rows may differ
            return TenantChanges(number, self.projects.newer(connection, known), self.keys.newer(connection, known))

    def changes(
        self,
        limit: int,
        *,
        before: int | None = None,
        after: int | None = None,
        project_ids: Sequence[str] = (),
        events: Sequence[str] = (),
        actors: Sequence[str] = (),
        targets: Sequence[str] = (),
        since_s: int | None = None,
        until_s: int | None = None,
    ) -> list[TenantChange]:
        """The audit log, newest first: up to `limit` records, older than `before`, newer than `after`, from `since_s`
        until just before `until_s`. An empty list of projects, events, actors or targets chooses all."""
        columns = tenant_audit.c
        query = select(tenant_audit).where(columns.base_digest == self._database.base_digest)
        if before is not None:
            query = query.where(columns.id < before)
        if after is not None:
            query = query.where(columns.id > after)
        if since_s is not None:
            query = query.where(columns.time_s >= since_s)
        if until_s is not None:
            query = query.where(columns.time_s < until_s)
        chosen = (
            (columns.project_id, project_ids), (columns.event, events), (columns.actor, actors),
            (columns.target, targets),
        )  # fmt: skip
        for column, values in chosen:
            if values:
                query = query.where(column.in_(values))
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(columns.id.desc()).limit(limit)).mappings().all()
        return [
            TenantChange(*(row[name] for name in ("id", "event", "actor", "project_id", "target", "detail", "time_s")))
            for row in rows
        ]
