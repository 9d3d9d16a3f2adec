"""A PostgreSQL that is lost and whose standby takes over keeps every change that was acknowledged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import text

from app.deployments.registry.db.database import Database
from app.engine.errors import NotReady
from tests.postgres import PostgresServer, find_postgres

#: How long a change may wait at most on a busy machine; a lost connection is noticed at once, a new one made in 5 s.
BACK_S = 120.0


@pytest.fixture
def servers() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary that acknowledges what its standby has, and the standby."""
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL's programs are not installed")
    primary = PostgresServer(programs)
    try:
        standby = PostgresServer(programs, copy_of=primary)
        try:
            primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            primary.execute("SELECT pg_reload_conf()")
            yield primary, standby
        finally:
            standby.stop()
    finally:
        primary.stop()


def test_a_standby_takes_over_with_all_that_was_acknowledged(servers: tuple[PostgresServer, PostgresServer]) -> None:
    primary, standby = servers
    url = primary.new_database().replace(
        f"host={primary.folder}", f"host={primary.folder},{standby.folder}&target_session_attrs=read-write"
    )
    database = Database(url, "base")
    acknowledged: list[int] = []
    refused: list[float] = []
    ends = threading.Event()

    def change_on_and_on() -> None:
        while not ends.is_set():
            try:
                with database.write() as connection:
                    revision = database.next_revision(connection)
            except NotReady:
                refused.append(time.monotonic())
                time.sleep(0.05)
            else:
                acknowledged.append(revision)

    def wait_for_more(number: int) -> None:
        deadline_s = time.monotonic() + BACK_S
        while len(acknowledged) < number:
            assert time.monotonic() < deadline_s, "changes do not work again"
            time.sleep(0.01)

    thread = threading.Thread(target=change_on_and_on)
    thread.start()
    try:
        wait_for_more(20)
        primary.kill()
        lost_s = time.monotonic()
        while not refused:
            assert time.monotonic() < lost_s + BACK_S
            time.sleep(0.01)
        before = len(acknowledged)
        standby.execute("SELECT pg_promote()")
        wait_for_more(before + 20)
    finally:
        ends.set()
        thread.join(60)
    assert acknowledged == sorted(set(acknowledged)), "no number was given twice: nothing was lost"
    with database.read() as connection:
        assert not connection.scalar(text("SELECT pg_is_in_recovery()"))
    database.close()
