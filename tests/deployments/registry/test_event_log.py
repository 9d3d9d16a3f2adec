"""The journal's pages: in order, and at the cost of a page, however many things have happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event

from app.deployments.registry.db.database import Database, sqlite_url
from app.deployments.registry.event_log import NewEvent, record_audit, record_events
from app.deployments.registry.registry import Registry


@contextmanager
def selected() -> Iterator[list[tuple[str, Any]]]:
    """The questions that databases are asked meanwhile, with their parameters."""
    asked: list[tuple[str, Any]] = []

    def note(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        if statement.startswith("SELECT"):
            asked.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("name", [None, "a"])
@pytest.mark.parametrize("what", ["events", "audit"])
def test_a_page_is_read_in_the_order_of_an_index(tmp_path: Any, what: str, name: str | None, goes_on: bool) -> None:
    """Sorting would cost as much as there is; SQLite says how it means to answer."""
    registry = Registry(sqlite_url(tmp_path / "r.sqlite"), "base")
    with registry.database.write() as connection:
        for action in ("requested", "registered"):
            record_events(connection, registry.database, [NewEvent(action, "a", "t")])
            record_audit(connection, registry.database, "ada", action, "a", "t", {})
    read = getattr(registry.event_log, what)
    newest, oldest = read(tenant_id="t")
    with selected() as asked:
        assert read(name, before=newest.id if goes_on else None, tenant_id="t") == [newest, oldest][goes_on:]
    *look_ups, (statement, parameters) = asked
    assert len(look_ups) == goes_on
    for look_up in look_ups:
        (step,) = _plan(registry.database, *look_up)
        assert step.startswith(f"SEARCH {what} USING INDEX {what}_by_public_id")
    (step,) = _plan(registry.database, statement, parameters)
    assert step.startswith(f"SEARCH {what} USING"), "nothing is sorted, and other tenants' are passed over"
    assert "tenant_id=?" in step
    registry.close()


def _plan(database: Database, statement: str, parameters: Any) -> list[str]:
    with database.read() as connection:
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    return [row[-1] for row in rows]
