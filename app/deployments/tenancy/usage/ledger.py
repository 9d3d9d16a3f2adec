"""The ledger: the database table of every tenant's usage, by the minute.

A batch is recorded once, however often it is sent: its number is written in the same transaction as its rows, and a
number that is not above the writer's last is known already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, and_, bindparam, delete, func, insert, select, update

from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tenant_tables import ledger, ledger_writers
from app.deployments.tenancy.quota.limits import month_start_s
from app.deployments.tenancy.usage.flusher import LedgerKey, Row, UsageRecord
from app.deployments.tenancy.usage.queries import UsageBucket, UsageQuery

_AMOUNTS = UsageRecord._fields
# Built once: building and compiling the statement takes four times as long as executing it.
_ADD = (
    update(ledger)
    .where(*(ledger.c[name] == bindparam(f"its_{name}") for name in ("base_digest", *LedgerKey._fields)))
    .values({name: ledger.c[name] + bindparam(f"more_{name}") for name in _AMOUNTS})
)
_BEGIN = insert(ledger)
#: A writer that has been silent for this long sends no batch again.
_WRITER_LIFE_S = 7 * 86_400.0
#: With more projects than this all are summed: databases bound the number of values in a statement.
_MAX_NAMED = 1000


class Ledger:
    """Every call is one transaction. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._base = database.base_digest

    def record(self, writer_id: str, number: int, rows: Sequence[Row]) -> bool:
        """Add a batch; returns False if it was recorded already."""
        now_s = self._database.clock()
        place = and_(ledger_writers.c.base_digest == self._base, ledger_writers.c.writer_id == writer_id)
        with self._database.write() as connection:
            last = connection.scalar(select(ledger_writers.c.number).where(place))
            if last is not None and number <= last:
                return False
            values = {"number": number, "time_s": now_s}
            if last is None:
                old = and_(ledger_writers.c.base_digest == self._base, ledger_writers.c.time_s < now_s - _WRITER_LIFE_S)
                connection.execute(delete(ledger_writers).where(old))
                writer = {"base_digest": self._base, "writer_id": writer_id}
                connection.execute(insert(ledger_writers).values(**writer, **values))
            else:
                connection.execute(update(ledger_writers).where(place).values(**values))
            for key, usage in rows:
                self._add(connection, key, usage)
            return True

    def buckets(self, query: UsageQuery) -> list[UsageBucket]:
        """Usage by the query's time buckets, empty ones included, each grouped as the query asks."""
        width = query.width_s // 60
        columns = [ledger.c[name] for name in query.group_by]
        start = ledger.c.minute - ledger.c.minute % width
        sums = [func.sum(ledger.c[name]).label(name) for name in _AMOUNTS]
        query_sums = select(start.label("start"), *columns, *sums).where(
            ledger.c.base_digest == self._base,
            ledger.c.minute >= query.start_s // 60,
            ledger.c.minute < -(-query.end_s // 60),
        )
        if query.route_kind is not None:
            query_sums = query_sums.where(ledger.c.route_kind == query.route_kind)
        for name, values in query.only.items():
            query_sums = query_sums.where(ledger.c[name].in_(values))
        found: dict[int, list[tuple[Mapping[str, str], UsageRecord]]] = {}
        with self._database.read() as connection:
            for row in connection.execute(query_sums.group_by(start, *columns).order_by(start, *columns)).mappings():
                group = {column.name: row[column.name] for column in columns}
                found.setdefault(row["start"] * 60, []).append(
                    (group, UsageRecord(*(int(row[name]) for name in _AMOUNTS)))
                )
        starts = range(query.start_s, query.end_s, query.width_s)
        return [UsageBucket(each, each + query.width_s, tuple(found.get(each, ()))) for each in starts]

    def project_spend(self, project_id: str, now_s: float) -> int:
        """A project's spend since the start of the month of `now_s`, in nanos."""
        return self.spend_by_project([project_id], now_s)[project_id]

    def spend_by_project(self, project_ids: Collection[str], now_s: float) -> dict[str, int]:
        """The same for several projects."""
        sums = func.sum(ledger.c.cost_nanos)
        since_month = (ledger.c.base_digest == self._base, ledger.c.minute >= int(month_start_s(now_s)) // 60)
        query = select(ledger.c.project_id, sums).where(*since_month).group_by(ledger.c.project_id)
        if len(project_ids) <= _MAX_NAMED:
            query = query.where(ledger.c.project_id.in_(project_ids))
        with self._database.read() as connection:
            found = {project_id: int(spent) for project_id, spent in connection.execute(query)}
        return {project_id: found.get(project_id, 0) for project_id in project_ids}

    def total(self) -> UsageRecord:
        """All recorded usage."""
        sums = [func.sum(ledger.c[name]) for name in _AMOUNTS]
        with self._database.read() as connection:
            row = connection.execute(select(*sums).where(ledger.c.base_digest == self._base)).one()
        return UsageRecord(*(int(value or 0) for value in row))

    def _add(self, connection: Connection, key: LedgerKey, usage: UsageRecord) -> None:
        place = {"base_digest": self._base, **key._asdict()}
        amounts = usage._asdict()
        added = {f"its_{name}": value for name, value in place.items()}
        added |= {f"more_{name}": amount for name, amount in amounts.items()}
        if not connection.execute(_ADD, added).rowcount:
            connection.execute(_BEGIN, {**place, **amounts})
