"""When adapters were last used: kept in memory, written down now and then.

In: digests and times, as replicas tell them once a second. Out: rows of `uses`, written together every
`WRITE_INTERVAL_S`, as many as digests were used since. What is lost with a crash is the order of half a minute. Rule:
an older time never replaces a newer one, and contents that no name means have no row.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Executable, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from app.deployments.registry.db.tables import adapters, uses
from app.deployments.registry.models import State

#: How often use is written down.
WRITE_INTERVAL_S = 30.0
#: Digests whose use may wait to be written; of more the last used are kept.
MAX_UNWRITTEN = 16_384
#: Digests that one question may name: fewer than SQLite's limit of variables.
_MAX_ASKED = 10_000


class LastUsed:
    """Use that is not written down yet; one event loop. `write` is called in threads and may raise NotReady."""

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
        """Write down what there is. Raises NotReady; then it is tried again with what comes until then."""
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
    while asked := list(islice(digests, _MAX_ASKED)):
        living = select(adapters.c.digest).where(
            adapters.c.base_digest == base_digest, adapters.c.state == State.LOADED, adapters.c.digest.in_(asked)
        )
        rows = [
            {"base_digest": base_digest, "digest": digest, "last_used_s": last_used_s[digest]}
            for digest in connection.scalars(living.distinct())
        ]
        if rows:
            connection.execute(_insert_or_update(connection), rows)


def forget_use(connection: Connection, base_digest: str, digest: str | None) -> None:
    """A name no longer means these contents; if none does, they have no row. Part of the caller's transaction."""
    others = select(adapters.c.digest).where(
        adapters.c.base_digest == base_digest, adapters.c.digest == digest, adapters.c.state == State.LOADED
    )
    connection.execute(delete(uses).where(uses.c.base_digest == base_digest, uses.c.digest == digest, ~others.exists()))


def _insert_or_update(connection: Connection) -> Executable:
    """A row, or a later time in the row that is there."""
    make: Callable[..., Any] = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = make(uses)
    upsert: Executable = statement.on_conflict_do_update(
        index_elements=[uses.c.base_digest, uses.c.digest],
        set_={"last_used_s": statement.excluded.last_used_s},
        where=uses.c.last_used_s < statement.excluded.last_used_s,
    )
    return upsert
