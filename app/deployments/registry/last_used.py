"""When adapters were last used: collected in memory and stored now and then.

Replicas report digests and times once a second; every `WRITE_INTERVAL_S` they go to the table `uses` in one
transaction. A crash loses the order of the last half minute. An older time never replaces a newer one, and digests that
no name means have no row. A new replica loads first what was used last (`hottest_entries`).
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Executable, RowMapping, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from app.deployments.registry.db.adapter_queries import entry_of
from app.deployments.registry.db.tables import adapters, uses
from app.deployments.registry.models import CatalogEntry, State

#: How often uses are stored.
WRITE_INTERVAL_S = 30.0
#: Digests that may wait to be stored; beyond this the least recently used are dropped.
MAX_UNWRITTEN = 16_384
#: How many of the most recently used contents a new replica may be offered.
MAX_HOT = 1024
#: Digests in one query: fewer than SQLite's limit of variables.
_QUERY_BATCH = 10_000


class LastUsed:
    """Uses that are not stored yet; one event loop. `write` is called in threads and may raise NotReady."""

    def __init__(self, write: Callable[[Mapping[str, float]], None]) -> None:
        self._write = write
        self._last_s: dict[str, float] = {}

    def note(self, last_used_s: Mapping[str, float]) -> None:
        for digest, used_s in last_used_s.items():
            self._last_s[digest] = max(used_s, self._last_s.get(digest, used_s))
        if len(self._last_s) > MAX_UNWRITTEN:
            newest = heapq.nlargest(MAX_UNWRITTEN // 2, self._last_s.items(), key=lambda item: item[1])
            self._last_s = dict(newest)

    def last_s(self, digest: str) -> float | None:
        return self._last_s.get(digest)

    async def write(self) -> None:
        """Store all uses. Raises NotReady; the uses are then stored with the next call."""
        taken, self._last_s = self._last_s, {}
        if not taken:
            return
        try:
            await asyncio.to_thread(self._write, taken)
        except BaseException:
            self.note(taken)
            raise


def note_uses(connection: Connection, base_digest: str, last_used_s: Mapping[str, float]) -> None:
    """Part of the caller's transaction."""
    digests = iter(last_used_s)
    while batch := list(islice(digests, _QUERY_BATCH)):
        living = select(adapters.c.digest).where(
            adapters.c.base_digest == base_digest, adapters.c.state == State.LOADED, adapters.c.digest.in_(batch)
        )
        rows = [
            {"base_digest": base_digest, "digest": digest, "last_used_s": last_used_s[digest]}
            for digest in connection.scalars(living.distinct())
        ]
        if rows:
            connection.execute(_insert_or_update(connection), rows)


def forget_use(connection: Connection, base_digest: str, digest: str | None) -> None:
    """Delete the row of contents that no name means any more. Part of the caller's transaction."""
    others = select(adapters.c.digest).where(
        adapters.c.base_digest == base_digest, adapters.c.digest == digest, adapters.c.state == State.LOADED
    )
    connection.execute(delete(uses).where(uses.c.base_digest == base_digest, uses.c.digest == digest, ~others.exists()))


def recently_used(connection: Connection, base_digest: str) -> Sequence[RowMapping]:
    """The rows of loaded names that mean one of the `MAX_HOT` contents used last, those first. Part of the caller's
    transaction."""
    hottest = (
        select(uses.c.digest, uses.c.last_used_s)
        .where(uses.c.base_digest == base_digest)
        .order_by(uses.c.last_used_s.desc(), uses.c.digest)
        .limit(MAX_HOT)
        .subquery()
    )
    query = (
        select(adapters, hottest.c.last_used_s)
        .join(hottest, hottest.c.digest == adapters.c.digest)
        .where(adapters.c.base_digest == base_digest, adapters.c.state == State.LOADED)
        .order_by(hottest.c.last_used_s.desc(), adapters.c.tenant_id, adapters.c.name)
    )
    return connection.execute(query).mappings().all()


def hottest_entries(rows: Sequence[RowMapping], limit: int) -> list[CatalogEntry]:
    """The first entry of each digest among rows of `recently_used`, at most `limit`.

    They are sorted by (rank by recency) / (traffic weight), so weight 0 comes last.
    """
    first: dict[str, RowMapping] = {}
    weights: dict[str, float] = {}
    for row in rows:
        first.setdefault(row["digest"], row)
        weights[row["digest"]] = max(weights.get(row["digest"], 0.0), row["traffic_weight"])
    places = {
        digest: place / weights[digest] if weights[digest] > 0 else math.inf for place, digest in enumerate(first, 1)
    }
    return [entry_of(first[digest]) for digest in sorted(first, key=places.__getitem__)[:limit]]


def _insert_or_update(connection: Connection) -> Executable:
    """An upsert that replaces only older times."""
    make: Callable[..., Any] = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = make(uses)
    upsert: Executable = statement.on_conflict_do_update(
        index_elements=[uses.c.base_digest, uses.c.digest],
        set_={"last_used_s": statement.excluded.last_used_s},
        where=uses.c.last_used_s < statement.excluded.last_used_s,
    )
    return upsert
