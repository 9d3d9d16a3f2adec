"""One change of the tenants' tables: its transaction, its audit record and the revision that publishes it.

A change and its audit record share one transaction. The revision rises with it and is written into the published rows,
so another process with the same database notices the change and reads only what is new. Writing transactions wait for
each other.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, insert, select, update

from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tenant_tables import projects, tenant_audit, tenant_revisions
from app.deployments.registry.models import not_found_error
from app.engine.errors import InvalidRequest
from app.redaction import holds_key


class AuditedTransaction:
    """An open transaction of `actor`, the id of the key that makes the change; `revision` is the change's number."""

    def __init__(self, connection: Connection, database: Database, actor: str, revision: int) -> None:
        self.connection = connection
        self.revision = revision
        self.base = database.base_digest
        self.now_s = database.clock()
        self._actor = actor

    def row(self, table: Table, row_id: str, what: str, **conditions: object) -> Mapping[Any, Any]:
        """One row by id. Raises NotFound."""
        query = select(table).where(table.c.base_digest == self.base, table.c.id == row_id)
        for name, value in conditions.items():
            query = query.where(table.c[name] == value)
        row = self.connection.execute(query).mappings().first()
        if row is None:
            raise not_found_error(what, row_id)
        return row

    def active_project(self, project_id: str) -> Mapping[Any, Any]:
        """A project's row. Raises NotFound, and InvalidRequest if it is archived."""
        row = self.row(projects, project_id, "project")
        if row["archived_s"] is not None:
            raise InvalidRequest(f"project {project_id[:64]} is archived and cannot be changed")
        return row

    def insert(self, table: Table, **values: object) -> None:
        self.connection.execute(insert(table).values(base_digest=self.base, **values, **self._mark(table)))

    def update(self, table: Table, row_id: str, **values: object) -> None:
        """Update a row. Without values only its revision rises, because something published with it has changed."""
        self.update_all(table, (table.c.id == row_id,), **values)

    def update_all(self, table: Table, conditions: Sequence[ColumnElement[bool]], **values: object) -> None:
        """Update every row of this base model that matches the conditions."""
        place = (table.c.base_digest == self.base, *conditions)
        self.connection.execute(update(table).where(*place).values(**values, **self._mark(table)))

    def audit(self, event: str, target: str, project_id: str | None = None, **detail: object) -> None:
        self.insert(
            tenant_audit,
            event=event,
            actor=self._actor,
            project_id=project_id,
            target=target,
            detail=json.dumps(detail, ensure_ascii=False),
            time_s=self.now_s,
        )

    def _mark(self, table: Table) -> dict[str, int]:
        return {"revision": self.revision} if "revision" in table.c else {}


@contextmanager
def audited_transaction(database: Database, actor: str) -> Iterator[AuditedTransaction]:
    """A transaction that raises the revision."""
    with database.write() as connection:
        place = tenant_revisions.c.base_digest == database.base_digest
        rise = update(tenant_revisions).where(place).values(number=tenant_revisions.c.number + 1)
        revision = connection.scalar(rise.returning(tenant_revisions.c.number))
        if revision is None:
            revision = 1
            connection.execute(insert(tenant_revisions).values(base_digest=database.base_digest, number=revision))
        yield AuditedTransaction(connection, database, actor, revision)


def new_id(prefix: str) -> str:
    """A globally unique id: proj_..., key_..., svc_acct_..."""
    return f"{prefix}_{secrets.token_hex(12)}"


def checked_name(name: str, what: str) -> str:
    """The name without outer blanks. Raises InvalidRequest for a name that a list could not show."""
    if holds_key(name):
        raise InvalidRequest(f"a {what}'s name holds an API key; give it another", param="name")
    if not 1 <= len(name.strip()) <= 256 or not name.isprintable():
        raise InvalidRequest(f"a {what}'s name is 1 to 256 printable characters, not {name[:80]!r}", param="name")
    return name.strip()
