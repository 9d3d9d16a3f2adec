"""Retention: which rows a registry deletes, so that it stays bounded, and which uploads it still needs.

`trim` deletes events, audit records, and jobs of names that were never registered. Limits hold per name, so that a busy
adapter does not erase another's history, per tenant, by age and in total. Beyond the total the tenants with the most
rows lose their oldest. The default tenant's rows, which record what admin keys do, have a total of their own. Rows are
searched in a read transaction and deleted a few thousand at a time, so that no writer waits long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, delete, func, or_, select, union

from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import adapters, audit, events, jobs
from app.deployments.registry.models import DEFAULT_TENANT, FINAL_STATES, UPLOADED, State
from app.engine.adapters.combining.combination import SCHEME, original_sources

_DAY_S = 86_400.0
#: Most rows that one transaction deletes, and that one call of `trim` deletes from a table.
_DELETE_BATCH, _MAX_ROWS = 2_000, 100_000


class Limits(NamedTuple):
    """How many rows a table has per name, in total and per tenant but the default one, and their greatest age."""

    per_name: int
    total: int
    age_s: float
    per_tenant: int = 200_000


EVENTS = Limits(1_000, 1_000_000, 90 * _DAY_S)
AUDIT = Limits(10_000, 1_000_000, 400 * _DAY_S)
#: Only for names that were never registered; `job_table.MAX_JOBS_PER_NAME` bounds the others.
UNKNOWN_JOBS = Limits(20, 10_000, 7 * _DAY_S, per_tenant=2_000)


def trim(database: Database) -> int:
    """Delete the rows beyond the limits; returns their number."""
    is_known = select(adapters.c.name).where(
        adapters.c.base_digest == jobs.c.base_digest,
        adapters.c.tenant_id == jobs.c.tenant_id,
        adapters.c.name == jobs.c.name,
    )
    return (
        _trim(database, events, events.c.time_s, events.c.id, EVENTS)
        + _trim(database, audit, audit.c.time_s, audit.c.id, AUDIT)
        + _trim(
            database, jobs, jobs.c.updated_s, jobs.c.number, UNKNOWN_JOBS,
            jobs.c.state.in_(FINAL_STATES), ~is_known.exists(),
        )
    )  # fmt: skip


def uploads_in_use(database: Database) -> frozenset[str]:
    """The upload sources of names in service, of the parts of combinations, and of unfinished loads; earlier
    generations do not count."""
    meant = select(adapters.c.uri).where(
        adapters.c.base_digest == database.base_digest,
        adapters.c.state != State.REMOVED,
        _may_be_uploaded(adapters.c.uri),
    )
    loading = select(jobs.c.source).where(
        jobs.c.base_digest == database.base_digest,
        jobs.c.state.not_in(FINAL_STATES),
        _may_be_uploaded(jobs.c.source),
    )
    with database.read() as connection:
        sources = connection.scalars(union(meant, loading)).all()
    return frozenset(
        original for source in sources for original in original_sources(source) if original.startswith(UPLOADED)
    )


def _may_be_uploaded(source: ColumnElement[str]) -> ColumnElement[bool]:
    return or_(source.startswith(UPLOADED), source.startswith(SCHEME))


def _trim(
    database: Database,
    table: Table,
    time_s: ColumnElement[float],
    order: ColumnElement[int],
    limits: Limits,
    *where: ColumnElement[bool],
) -> int:
    with database.read() as connection:
        ids = _expired_ids(connection, database, table, time_s, order, limits, where)
    for start in range(0, len(ids), _DELETE_BATCH):
        with database.write() as connection:
            connection.execute(delete(table).where(table.c.id.in_(ids[start : start + _DELETE_BATCH])))
    return len(ids)


def _expired_ids(
    connection: Connection,
    database: Database,
    table: Table,
    time_s: ColumnElement[float],
    order: ColumnElement[int],
    limits: Limits,
    where: tuple[ColumnElement[bool], ...],
) -> list[int]:
    """Ids of rows that are too old, or too far from the newest of their name, of their tenant or of all.

    Counts, which indices answer, say first whether any name or tenant has too many.
    """
    rows = select(table.c.id).where(table.c.base_digest == database.base_digest, *where)
    tenant_id, name, number = table.c.tenant_id, table.c.name, func.count()
    ids = set(connection.scalars(rows.where(time_s < database.clock() - limits.age_s).limit(_MAX_ROWS)))
    long = rows.with_only_columns(tenant_id, name).group_by(tenant_id, name).having(number > limits.per_name)
    for of_tenant, of_name in connection.execute(long).all():
        of_one = rows.where(tenant_id == of_tenant, name == of_name)
        ids.update(connection.scalars(of_one.order_by(order.desc()).offset(limits.per_name).limit(_MAX_ROWS)))
    of_tenants = connection.execute(rows.with_only_columns(tenant_id, number).group_by(tenant_id)).all()
    counts: dict[str, int] = dict(of_tenants)
    of_default = counts.pop(DEFAULT_TENANT, 0)
    if max(of_default, sum(counts.values())) > limits.total or max(counts.values(), default=0) > limits.per_tenant:
        ids.update(connection.scalars(_beyond_totals(rows, table, order, limits)))
    return sorted(ids)[:_MAX_ROWS]


def _beyond_totals(rows: Select[Any], table: Table, order: ColumnElement[int], limits: Limits) -> Select[Any]:
    """Ids of those of `rows` that are too far from the newest of their tenant or of all."""
    of_tenant = func.row_number().over(partition_by=table.c.tenant_id, order_by=order.desc())
    ranked = rows.add_columns(table.c.tenant_id, of_tenant.label("of_tenant")).subquery()
    is_default = ranked.c.tenant_id == DEFAULT_TENANT
    of_all = func.row_number().over(partition_by=is_default, order_by=(ranked.c.of_tenant, ranked.c.id.desc()))
    places = select(ranked, is_default.label("is_default"), of_all.label("of_all")).subquery()
    is_beyond = or_(and_(~places.c.is_default, places.c.of_tenant > limits.per_tenant), places.c.of_all > limits.total)
    return select(places.c.id).where(is_beyond).limit(_MAX_ROWS)
