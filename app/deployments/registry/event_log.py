"""The event log (what happened to adapters) and the audit log (who requested what).

A record is written in the transaction of the change it describes, so neither exists without the other. `db.retention`
deletes old records.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, insert, select

from app.deployments.registry.db.database import Database, storable_text
from app.deployments.registry.db.tables import audit, events
from app.deployments.registry.models import AuditRecord, Event
from app.deployments.registry.tier_events import Move
from app.deployments.rpc.background_tasks import Tasks
from app.engine.errors import InvalidRequest, NotReady

logger = logging.getLogger(__name__)

#: Moves are written in one transaction, this long after the first.
MOVES_DELAY_S = 0.2
#: The fields of an `Event` after its id.
_EVENT_COLUMNS = ("name", "event", "time_s", "generation", "digest", "detail", "replica_id")


class NewEvent(NamedTuple):
    """An event to write; `time_s` None: now. `event` is a phrase such as "loaded to device" or "registered"."""

    event: str
    name: str
    tenant_id: str
    generation: int | None = None
    digest: str | None = None
    detail: str | None = None
    replica_id: str | None = None
    time_s: float | None = None


def record_events(connection: Connection, database: Database, new_events: Sequence[NewEvent]) -> None:
    """Part of the caller's transaction."""
    if not new_events:
        return
    now_s = database.clock()
    rows = [
        item._asdict()
        | {
            "base_digest": database.base_digest,
            "time_s": now_s if item.time_s is None else item.time_s,
            "detail": item.detail and storable_text(item.detail),
        }
        for item in new_events
    ]
    connection.execute(insert(events), rows)


def record_audit(
    connection: Connection,
    database: Database,
    who: str,
    action: str,
    name: str,
    tenant_id: str,
    detail: Mapping[str, Any],
) -> None:
    """Part of the caller's transaction."""
    connection.execute(
        insert(audit).values(
            base_digest=database.base_digest,
            tenant_id=tenant_id,
            who=who,
            action=action,
            name=name,
            detail=json.dumps(detail, ensure_ascii=False),
            time_s=database.clock(),
        )
    )


class EventLog:
    """Pages of both logs, newest first; `before` is the id of the last record of the previous page.

    Raises InvalidRequest if the tenant has no record `before`. Ids are random: numbers would tell a tenant how much
    happens to others.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def events(
        self,
        name: str | None = None,
        *,
        limit: int = 100,
        before: str | None = None,
        tenant_id: str,
        only: Collection[str] | None = None,
    ) -> list[Event]:
        """`only`: the events to list, all of them if None."""
        return [
            Event(row["public_id"], *(row[column] for column in _EVENT_COLUMNS))
            for row in self._page(events, name, limit, before, tenant_id, only)
        ]

    def audit(
        self, name: str | None = None, *, limit: int = 100, before: str | None = None, tenant_id: str
    ) -> list[AuditRecord]:
        return [
            AuditRecord(row["public_id"], row["who"], row["action"], row["name"], row["detail"], row["time_s"])
            for row in self._page(audit, name, limit, before, tenant_id)
        ]

    def record_audit(self, who: str, action: str, name: str, *, tenant_id: str) -> None:
        """Record a call that changes nothing in the database."""
        with self._database.write() as connection:
            record_audit(connection, self._database, who, action, name, tenant_id, {})

    def _page(
        self,
        table: Table,
        name: str | None,
        limit: int,
        before: str | None,
        tenant_id: str,
        only: Collection[str] | None = None,
    ) -> Sequence[Mapping[Any, Any]]:
        query = select(table).where(table.c.base_digest == self._database.base_digest, table.c.tenant_id == tenant_id)
        if name is not None:
            query = query.where(table.c.name == name)
        if only is not None:
            query = query.where(table.c.event.in_(sorted(only)))
        with self._database.read() as connection:
            if before is not None:
                query = query.where(table.c.id < self._number(connection, table, before, tenant_id))
            return connection.execute(query.order_by(table.c.id.desc()).limit(limit)).mappings().all()

    def _number(self, connection: Connection, table: Table, public_id: str, tenant_id: str) -> int:
        is_it = (table.c.base_digest == self._database.base_digest, table.c.public_id == public_id)
        number: int | None = connection.scalar(select(table.c.id).where(*is_it, table.c.tenant_id == tenant_id))
        if number is None:
            raise InvalidRequest(
                f"before is {public_id[:40]!r}; it must be the id of a record of this list", param="before"
            )
        return number


class MoveWriter:
    """Writes moves between tiers in batches, `MOVES_DELAY_S` after the first; one event loop.

    `write` is called in threads. Moves that the database does not accept are lost, with a log line: the tiers do not
    wait for their history.
    """

    def __init__(self, write: Callable[[Sequence[Move]], None]) -> None:
        self._write = write
        self._moves: list[Move] = []
        self._tasks = Tasks()

    def write_soon(self, move: Move) -> None:
        self._moves.append(move)
        if len(self._moves) == 1:
            self._tasks.start(self._write_all())

    async def _write_all(self) -> None:
        await asyncio.sleep(MOVES_DELAY_S)
        moves, self._moves = self._moves, []
        try:
            await asyncio.to_thread(self._write, moves)
        except NotReady as error:
            logger.warning("%d moves between tiers are missing in the event log: %s", len(moves), error)
