"""Which uploads the registry needs.

In: the database. Out: sources of uploads that a name means, or that a load which is not over will read. Rule: what is
not in the answer may be removed; what a name has meant before is not in it.
"""

from __future__ import annotations

from sqlalchemy import select, union

from app.deployments.registry.database import Database
from app.deployments.registry.entries import FINAL_STATES, UPLOADED, State
from app.deployments.registry.tables import adapters, jobs


def uploads_in_use(database: Database) -> frozenset[str]:
    """Their sources."""
    meant = select(adapters.c.uri).where(
        adapters.c.base_digest == database.base_digest,
        adapters.c.state != State.REMOVED,
        adapters.c.uri.startswith(UPLOADED),
    )
    loading = select(jobs.c.source).where(
        jobs.c.base_digest == database.base_digest,
        jobs.c.state.not_in(FINAL_STATES),
        jobs.c.source.startswith(UPLOADED),
    )
    with database.read() as connection:
        return frozenset(connection.scalars(union(meant, loading)))
