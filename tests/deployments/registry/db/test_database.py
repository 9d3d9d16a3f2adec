"""The schema and its transactions: made once however many start, never half, and the same in every database."""

from __future__ import annotations

import hashlib
import secrets
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, inspect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from app.deployments.registry.db import database as database_module
from app.deployments.registry.db.database import Database, sqlite_url
from app.deployments.registry.db.storage_tables import metadata as kept_metadata
from app.deployments.registry.db.tables import SCHEMA_VERSION
from app.deployments.registry.db.tenant_tables import metadata
from app.deployments.registry.registry import Registry
from app.engine.errors import ConfigError, NotReady
from tests.deployments.managed import ADA, MINE, register
from tests.postgres import PostgresServer

ROOT = Path(__file__).parents[3]
#: All that a client is told of a database that is in trouble.
SENTENCE = "^the registry's database does not answer; try again$"


#: A schema version, and a digest of its columns and keys.
SCHEMA = (5, "050cd8d5bb2e30e3")


def test_a_change_of_a_table_is_another_schema_version() -> None:
    assert kept_metadata is metadata, "the tables of what is kept are among them"
    statements = "\n".join(
        str(CreateTable(table).compile(dialect=postgresql.dialect())) for table in metadata.sorted_tables
    )
    fingerprint = hashlib.sha256(statements.encode()).hexdigest()[:16]
    assert (SCHEMA_VERSION, fingerprint) == SCHEMA, "a table has changed: raise SCHEMA_VERSION, and write both here"


def test_a_database_of_a_release_with_fewer_indices_gets_the_others(empty_url: str) -> None:
    database = Database(empty_url, "base")
    with database.write() as connection:
        connection.execute(text("DROP INDEX adapters_by_contents"))
        connection.execute(text("CREATE INDEX adapters_by_digest ON adapters (base_digest, digest)"))
    database.close()
    for _ in range(2):
        database = Database(empty_url, "base")
        with database.read() as connection:
            names = {index["name"] for index in inspect(connection).get_indexes("adapters")}
        assert names == {"adapters_by_contents", "adapters_by_digest", "adapters_by_revision"}
        database.close()


def test_an_empty_database_gets_all_tables(empty_url: str) -> None:
    for _ in range(2):
        database = Database(empty_url, "base")
        with database.read() as connection:
            assert set(inspect(connection).get_table_names()) - {"sqlite_sequence"} == set(metadata.tables)
            assert connection.execute(text("SELECT version FROM schema_versions")).scalars().all() == [SCHEMA_VERSION]
        database.close()


def test_processes_that_start_together_make_the_schema_once(empty_url: str) -> None:
    code = (
        "import sys; from app.deployments.registry.registry import Registry\n"
        "from app.deployments.registry.models import LoadRequest\n"
        "from app.engine.adapters.card import AdapterCard\n"
        "sys.stdin.readline()\n"
        "registry = Registry(sys.argv[1], 'base')\n"
        "card = AdapterCard('d' * 64, 'base', 1, ('q_proj',), 'float32', 1)\n"
        "registry.catalog.register(LoadRequest('t', sys.argv[2], 'uri', 'w'), 'uri', card)\n"
        "registry.close()"
    )
    starters = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, empty_url, f"n{index}"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for starter in starters:  # all have imported what they need, or will: then all go
        assert starter.stdin is not None
        starter.stdin.write("go\n")
        starter.stdin.flush()
    for starter in starters:
        _, complaints = starter.communicate(timeout=600)
        assert starter.returncode == 0, complaints
    registry = Registry(empty_url, "base")
    assert [entry.name for entry in registry.catalog.entries()] == ["n0", "n1"]
    registry.close()


def test_a_file_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    """SQLite itself refuses at once where it would wait with a lock that the other needs."""
    maker = sqlite3.connect(tmp_path / "new.sqlite", isolation_level=None, check_same_thread=False)
    maker.execute("BEGIN IMMEDIATE")
    thread = threading.Timer(0.5, maker.execute, ["COMMIT"])
    thread.start()
    database = Database(sqlite_url(tmp_path / "new.sqlite"), "base")
    with database.read() as connection:
        assert connection.scalar(text("SELECT count(*) FROM adapters")) == 0
    thread.join(600)
    database.close()
    maker.close()


def test_a_schema_that_is_half_made_leaves_nothing_behind(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.create_all

    def create_then_die(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise RuntimeError("the power goes")

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "create_all", create_then_die)
        with pytest.raises(RuntimeError, match="power"):
            Database(empty_url, "base")
    database = Database(empty_url, "base")
    with database.read() as connection:
        assert connection.scalar(text("SELECT count(*) FROM adapters")) == 0
    database.close()


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
def test_a_registry_that_another_version_made_is_refused_and_left_as_it_is(empty_url: str, version: int) -> None:
    database = Database(empty_url, "base")
    with database.write() as connection:
        connection.execute(text("UPDATE schema_versions SET version = :version").bindparams(version=version))
        connection.execute(text("DROP TABLE uses"))  # to make what is missing would bring it back
    for _ in range(2):
        with pytest.raises(
            ConfigError,
            match=rf"has schema version {version}, but .* schema version {SCHEMA_VERSION} only.* empty place",
        ):
            Database(empty_url, "base")
    with database.read() as connection:
        assert connection.scalar(text("SELECT version FROM schema_versions")) == version
        assert not inspect(connection).has_table("uses")
    database.close()


def test_a_registry_made_before_schema_versions_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    with sqlite3.connect(path) as old:
        old.execute("CREATE TABLE adapters (tenant_id VARCHAR NOT NULL, name VARCHAR NOT NULL)")
        old.execute("INSERT INTO adapters VALUES ('default', 'sql')")
    with pytest.raises(ConfigError, match=r"has no schema version, but .* empty place"):
        Registry(sqlite_url(path), "base")
    assert old.execute("SELECT * FROM adapters").fetchall() == [("default", "sql")]
    assert old.execute("SELECT name FROM sqlite_master").fetchall() == [("adapters",)]
    old.close()


def test_writers_take_turns_and_readers_do_not_wait(shared_url: str) -> None:
    database = Database(shared_url, "base")
    entered, order = threading.Event(), []

    def second() -> None:
        entered.set()
        with database.write():
            order.append("second")

    with database.write():
        thread = threading.Thread(target=second)
        thread.start()
        assert entered.wait(600)
        with database.read() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
        order.append("first")
    thread.join(600)
    assert order == ["first", "second"]
    database.close()


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://u:secret@h/d", "sqlite://", "sqlite:///:memory:", "frog://x"])
def test_urls_that_name_no_registry(url: str) -> None:
    with pytest.raises(ConfigError, match=r"adapters\.registry_url") as caught:
        Database(url, "base")
    assert "secret" not in str(caught.value)


def test_a_full_disk_is_said_and_ends_when_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(sqlite_url(tmp_path / "registry.sqlite"), "base")
    limits = [1, 2**30]

    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count={limits[0]}").close()  # never below what there is

    registry.database.close()  # so that the limit is set on every connection
    event.listen(registry.database._engine, "connect", limit)
    with pytest.raises(NotReady, match=SENTENCE):
        register(registry.catalog, "big", "u" * 100_000, "d", max_rank=1, size_bytes=1, **ADA)
    assert "database or disk is full" in caplog.text
    assert registry.catalog.entries() == []
    del limits[0]
    registry.database.close()
    register(registry.catalog, "big", "u" * 100_000, "d", max_rank=1, size_bytes=1, **ADA)
    assert [entry.name for entry in registry.catalog.entries()] == ["big"]
    registry.close()


def test_a_database_that_can_only_be_read_serves_and_takes_no_change(
    empty_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a PostgreSQL standby, or a file on a disk that was mounted anew."""
    registry = Registry(empty_url, "base")
    register(registry.catalog, "sql", "/sql", "d", max_rank=1, size_bytes=1, **ADA)

    def read_only(connection: Any, _: object) -> None:
        is_sqlite = isinstance(connection, sqlite3.Connection)
        connection.execute("PRAGMA query_only=ON" if is_sqlite else "SET default_transaction_read_only = on").close()
        if not is_sqlite:
            connection.commit()

    registry.database.close()
    event.listen(registry.database._engine, "connect", read_only)
    assert registry.catalog.get("sql", **MINE) is not None
    with pytest.raises(NotReady, match=SENTENCE):
        registry.catalog.configure("sql", pinned=True, **ADA)
    assert "readonly" in caplog.text or "read-only" in caplog.text
    registry.close()


@pytest.mark.parametrize("contents", [b"no database " * 1000, None])
def test_a_damaged_file_is_said(tmp_path: Path, contents: bytes | None) -> None:
    """At start it is what the operator must mend; later changes have to wait, and nothing else."""
    file = tmp_path / "registry.sqlite"
    registry = Registry(sqlite_url(file), "base")
    register(registry.catalog, "sql", "/sql", "d", max_rank=1, size_bytes=1, **ADA)
    registry.close()
    file.write_bytes(file.read_bytes()[:9000] if contents is None else contents)
    with pytest.raises(NotReady, match="the registry's database is damaged; the store's log has the details"):
        registry.catalog.entries()
    with pytest.raises(ConfigError, match=r"registry\.sqlite is damaged \((file is not|database disk image is)"):
        Registry(sqlite_url(file), "base").change_query.since(0)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"):
        Database(sqlite_url(tmp_path / "file" / "folder" / "registry.sqlite"), "base")


def test_a_database_that_does_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Clients are told nothing of where it is and who asked; the log is, except for the password."""
    with pytest.raises(NotReady, match=SENTENCE):
        Database(f"postgresql://user:secret@/registry?host={tmp_path}", "base")
    assert str(tmp_path) in caplog.text
    assert "secret" not in caplog.text


def test_transactions_share_the_connections_that_are_kept(shared_url: str) -> None:
    """To open one takes longer than most transactions; threads that come at once have one each."""
    database = Database(shared_url, "base")
    opened: list[object] = []
    event.listen(database._engine, "connect", lambda connection, _: opened.append(connection))
    with database.read() as one, database.read() as two, database.read() as three:
        assert [connection.scalar(text("SELECT 1")) for connection in (one, two, three)] == [1, 1, 1]
    num_opened = len(opened)
    for _ in range(5):
        with database.read() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
    with database.write() as connection:
        assert database.next_revision(connection) > 0
    assert len(opened) == num_opened <= 3
    database.close()


def test_a_file_that_was_replaced_while_it_was_open_is_met_as_it_is_now(tmp_path: Path) -> None:
    """No kept connection writes into a file that nobody can find any more."""
    registry, other = (Registry(sqlite_url(tmp_path / f"{name}.sqlite"), "base") for name in ("kept", "other"))
    register(registry.catalog, "old", "/old", "d", max_rank=1, size_bytes=1, **ADA)
    register(other.catalog, "new", "/new", "d", max_rank=1, size_bytes=1, **ADA)
    other.close()
    registry_files = [tmp_path / f"kept.sqlite{end}" for end in ("-wal", "-shm")]
    for file in registry_files:
        file.unlink()
    (tmp_path / "other.sqlite").rename(tmp_path / "kept.sqlite")
    assert [entry.name for entry in registry.catalog.entries()] == ["new"]
    register(registry.catalog, "newer", "/newer", "d", max_rank=1, size_bytes=1, **ADA)
    registry.close()
    (tmp_path / "kept.sqlite").unlink()
    with pytest.raises(NotReady, match=SENTENCE):
        registry.catalog.entries()
    registry.close()


def test_whatever_the_database_raises_is_not_ready(shared_url: str) -> None:
    database = Database(shared_url, "base")
    for statement in ("SELECT nothing FROM nowhere", "INSERT INTO registries VALUES ('base', 'again', 1)", "no SQL"):
        with pytest.raises(NotReady, match=SENTENCE), database.write() as connection:
            connection.execute(text(statement))
    with database.read() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    database.close()


def test_a_view_is_of_one_moment(shared_url: str) -> None:
    database = Database(shared_url, secrets.token_hex(8))
    query = text("SELECT revision FROM registries WHERE base_digest = :base").bindparams(base=database.base_digest)
    with database.read() as reading:
        before = reading.scalar(query)
        with database.write() as writing:
            assert database.next_revision(writing) == before + 1
        assert reading.scalar(query) == before
    with database.read() as reading:
        assert reading.scalar(query) == before + 1
    database.close()


def test_a_writer_that_holds_the_lock_is_waited_for_no_longer_than_this(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "LOCK_TIMEOUT_S", 0.2)
    one, two, other = Database(shared_url, "base"), Database(shared_url, "base"), Database(shared_url, "other")
    with one.write():
        with pytest.raises(NotReady, match=SENTENCE), two.write():
            raise AssertionError("two wrote at once")
        if not shared_url.startswith("sqlite"):  # which has one lock for all
            with other.write() as connection:
                assert other.next_revision(connection) > 0
    with two.write() as connection:
        assert two.next_revision(connection) > 0
    for database in (one, two, other):
        database.close()


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_server_that_stands_still_is_waited_for_no_longer_than_this(
    shared_url: str, request: pytest.FixtureRequest, is_busy: bool
) -> None:
    """It looks alive: its kernel takes what is sent, and its own limits stand still with it."""
    if shared_url.startswith("sqlite"):
        return  # it has no server
    server: PostgresServer = request.getfixturevalue("postgres")
    database = Database(shared_url, "base")

    def read() -> object:
        with database.read() as connection:
            return connection.scalar(text("SELECT 1"))

    def read_while_it_stands() -> None:
        with database.read() if is_busy else nullcontext() as connection:
            if connection is not None:
                driver: Any = connection.connection.dbapi_connection
                driver.timeout_s = 0.1
            server.send(signal.SIGSTOP)
            read() if connection is None else connection.execute(text("SELECT 1"))

    def connect_soon(_: object, __: object, ___: object, options: dict[str, Any]) -> None:
        options["connect_timeout"] = 2  # the least there is

    usual = database._timeouts.idle_s
    database._timeouts.idle_s = 0.1
    assert read() == 1, "and the connection is idle from here on"
    database._timeouts.idle_s = usual
    event.listen(database._engine, "do_connect", connect_soon, insert=True)
    try:
        with pytest.raises(NotReady, match=SENTENCE):
            read_while_it_stands()
    finally:
        server.send(signal.SIGCONT)
        event.remove(database._engine, "do_connect", connect_soon)
    assert read() == 1
    database.close()


def test_postgresql_is_asked_with_limits_for_everything(shared_url: str) -> None:
    if shared_url.startswith("sqlite"):
        return  # what it has is LOCK_TIMEOUT_S
    database = Database(shared_url + "&options=-c%20application_name%3Dours", "base")
    with database.read() as connection:
        told = {
            name: connection.scalar(text(f"SHOW {name}"))
            for name in (
                "lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout", "transaction_isolation",
                "application_name",
            )
        }  # fmt: skip
        driver = connection.connection.dbapi_connection
        assert driver is not None
        asked = driver.info.get_parameters()  # type: ignore[attr-defined]
    database.close()
    assert told == {
        "lock_timeout": "30s",
        "statement_timeout": "1min",
        "idle_in_transaction_session_timeout": "1min",
        "transaction_isolation": "repeatable read",
        "application_name": "ours",
    }
    for name in ("connect_timeout", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"):
        assert int(asked[name]) > 0


def test_every_number_that_counts_up_has_64_bits() -> None:
    """As PostgreSQL is told."""
    counters = {
        table.name: column for table in metadata.sorted_tables if (column := table.autoincrement_column) is not None
    }
    assert set(counters) == {"events", "audit", "tenant_audit"}
    types = {name: column.type.compile(dialect=postgresql.dialect()) for name, column in counters.items()}
    assert types == dict.fromkeys(counters, "BIGINT")


@pytest.mark.parametrize("table", ["events", "audit"])
def test_numbers_go_on_after_two_billion(empty_url: str, table: str) -> None:
    registry = Registry(empty_url, "base")
    register(registry.catalog, "a", "/a", "d", max_rank=1, size_bytes=1, **ADA)
    with registry.database.write() as connection:
        if empty_url.startswith("sqlite"):
            connection.execute(text(f"UPDATE sqlite_sequence SET seq = {2**31 - 1} WHERE name = '{table}'"))
        else:
            connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), {2**31 - 1})"))
    register(registry.catalog, "b", "/b", "d", max_rank=1, size_bytes=1, **ADA)
    with registry.database.read() as connection:
        assert connection.scalar(text(f"SELECT max(id) FROM {table}")) == 2**31
    page = registry.event_log.events(**MINE) if table == "events" else registry.event_log.audit(**MINE)
    assert page[0].name == "b"
    registry.close()
