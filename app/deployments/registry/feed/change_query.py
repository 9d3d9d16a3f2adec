"""Which names have changed since a revision.

Every transaction that changes what a name means takes the next revision and writes it into the rows it changes. A
removed name keeps its row, so that its removal is a change too. Revisions belong to one base model and never fall.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import select

from app.deployments.registry.aliases import changed_aliases
from app.deployments.registry.db.adapter_queries import changed_adapters
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import registries
from app.deployments.registry.feed.view import Entry, Key


class RegistryChanges(NamedTuple):
    """Changed names in order of their changes; None: the name has no meaning any more."""

    revision: int
    rows: list[tuple[Key, Entry | None]]


class ChangeQuery:
    """Every call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def since(self, revision: int) -> RegistryChanges:
        """Changes after `revision`; after 0: all names that mean something."""
        base_digest = self._database.base_digest
        query = select(registries.c.revision).where(registries.c.base_digest == base_digest)
        with self._database.read() as connection:
            newest: int = connection.execute(query).scalar_one()
            if newest == revision:
                return RegistryChanges(newest, [])
            changed = changed_adapters(connection, base_digest, revision)
            changed += changed_aliases(connection, base_digest, revision)
        # A name may be removed as an adapter and added as an alias: the later change counts.
        changed.sort(key=lambda item: item[0])
        return RegistryChanges(newest, [(key, entry) for _, key, entry in changed])
