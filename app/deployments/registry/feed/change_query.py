"""What has changed in a registry since it was last looked at, whoever changed it.

In: the number of the last change that somebody knows. Out: the rows that are newer, as they are now, and the number of
the newest. Every transaction that changes what a name means takes the next number and writes it into the rows it
changes; a name that is gone keeps its row, so that its going is news as well. Numbers belong to one base model and
never fall.
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
    """Names that changed, in the order of their changes; None: it means nothing any more."""

    revision: int
    rows: list[tuple[Key, Entry | None]]


class ChangeQuery:
    """Every call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def since(self, revision: int) -> RegistryChanges:
        """What is newer than `revision`. 0: everything that a name means, and nothing of what is gone."""
        base_digest = self._database.base_digest
        query = select(registries.c.revision).where(registries.c.base_digest == base_digest)
        with self._database.read() as connection:
            newest: int = connection.execute(query).scalar_one()
            if newest == revision:
                return RegistryChanges(newest, [])
            changed = changed_adapters(connection, base_digest, revision)
            changed += changed_aliases(connection, base_digest, revision)
        # A name may have gone as one kind and come as the other: the later change is what it means.
        changed.sort(key=lambda item: item[0])
        return RegistryChanges(newest, [(key, entry) for _, key, entry in changed])
