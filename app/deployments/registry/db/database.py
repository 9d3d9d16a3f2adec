"""The registry's database (a SQLite file or PostgreSQL): its transactions and its schema.

Writers take turns in every database, so what a writer has read is still true when it writes; readers wait for no one,
and every call ends in bounded time. In an empty database the constructor creates the tables, in one transaction, also
when several processes start together; a schema of another version is refused and left alone. A database failure becomes
NotReady with a fixed message: the database's own words may name hosts and users and go only to the log.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, event, insert, inspect, select, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DataError,
    DisconnectionError,
    NoSuchModuleError,
    SQLAlchemyError,
)
from sqlalchemy.pool import ConnectionPoolEntry

from app.deployments.registry.db import storage_tables, tenant_tables  # noqa: F401  (their tables are in `metadata`)
from app.deployments.registry.db.tables import SCHEMA_VERSION, metadata, registries, schema_versions
from app.engine.errors import ConfigError, InvalidRequest, NotReady

logger = logging.getLogger(__name__)

#: How long a call waits for another process's transaction.
LOCK_TIMEOUT_S = 30.0
#: How long a call waits for a PostgreSQL connection, new or from the pool.
CONNECT_TIMEOUT_S = 5
#: The longest a statement may take, and the longest a transaction may be idle before the server ends it.
STATEMENT_TIMEOUT_S = 60
#: How much longer than the statement timeout the client waits for the server to report it.
GRACE_S = 10.0
#: A connection with bytes unacknowledged for so long is lost; an idle one is probed after half of it.
SILENCE_TIMEOUT_S = 20
#: Connections that stay open. Calls come from a few threads of one process.
POOL_SIZE = 4
#: Longest free text that is stored: a failure's reason may quote a file.
MAX_TEXT = 2000
#: SQLSTATEs of texts that PostgreSQL cannot store (invalid characters, too long); None: psycopg refused it itself.
_UNSTORABLE_TEXT = (None, "22021", "22P05", "22001")


class Database:
    """Every call is one transaction; threads and processes may call concurrently."""

    def __init__(self, url: str, base_digest: str, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives the Unix times that are stored.

        Raises ConfigError for a URL or schema that cannot be used, NotReady if the database does not answer.
        """
        self.base_digest = base_digest
        self.clock = clock
        self.known_revision = 0  # of the newest change that this process has seen; `ChangeFeed` sets it
        parsed = _parse_url(url)
        self.address = parsed.render_as_string(hide_password=True)
        self._num_open, self._idle = 0, threading.Condition()
        self._writing = threading.Lock()
        self._is_sqlite = parsed.get_backend_name() == "sqlite"
        options: dict[str, Any]
        if self._is_sqlite:
            _make_file(Path(parsed.database or ""))
            # Connections stay open: opening one takes ten times as long as most transactions, and closing the last
            # makes SQLite write its log back into the file. Their number is not limited, so no call waits for one.
            # AUTOCOMMIT: `_transaction` begins transactions itself; pysqlite would begin them too late.
            options = {
                "pool_size": POOL_SIZE,
                "max_overflow": -1,
                "pool_use_lifo": True,
                "isolation_level": "AUTOCOMMIT",
                "connect_args": {"timeout": LOCK_TIMEOUT_S},
            }
        else:
            options = {
                "pool_size": POOL_SIZE,
                "pool_timeout": CONNECT_TIMEOUT_S,
                "pool_pre_ping": True,
                "connect_args": _postgres_options(parsed),
            }
        try:
            self._engine = create_engine(parsed, **options)
            if not self._is_sqlite:
                from app.deployments.registry.db.postgres_timeouts import (
                    PostgresTimeouts,  # needs psycopg
                )

                self._timeouts = PostgresTimeouts(
                    self._engine, idle_s=CONNECT_TIMEOUT_S, busy_s=STATEMENT_TIMEOUT_S + GRACE_S
                )
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"adapters.registry_url needs {error.name}, which is not installed; pip install 'polylora[postgres]'"
            ) from error
        if self._is_sqlite:
            event.listen(self._engine, "connect", _use_wal)
            event.listen(self._engine, "checkout", _check_same_file(Path(parsed.database or "")))
        try:
            self._create_schema()
            self.origin = self._registry_id()
        except _CorruptDatabase as error:
            self.close()
            raise ConfigError(
                f"the registry at {self.address} is damaged ({error.reason}); restore a copy of it"
            ) from error
        except BaseException:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent snapshot. Raises NotReady if the database is away, InvalidRequest for unstorable text."""
        with self._transaction(lock=None) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction during which no one else writes to this base model's registry. Raises the same as `read`."""
        with self._transaction(lock=self.base_digest) as connection:
            yield connection

    def next_revision(self, connection: Connection) -> int:
        """The revision of the change that the caller's transaction makes (`feed.change_query`).

        Raises NotReady, which rolls back, if another change had that revision: the database is an older copy of itself.
        """
        mine = update(registries).where(registries.c.base_digest == self.base_digest)
        raised = mine.values(revision=registries.c.revision + 1).returning(registries.c.revision)
        revision: int = connection.execute(raised).scalar_one()
        if revision <= self.known_revision:
            raise older_database_error(self.known_revision)
        return revision

    def close(self) -> None:
        """Waits for transactions in other threads, as long as one may take."""
        with self._idle:
            self._idle.wait_for(lambda: self._num_open == 0, STATEMENT_TIMEOUT_S)
        self._engine.dispose()

    def _create_schema(self) -> None:
        """Create the tables in an empty database, and indices that the release that made it did not have.

        Raises ConfigError for a schema of another version.
        """
        with self._transaction(lock="schema") as connection:
            present = set(inspect(connection).get_table_names()) & metadata.tables.keys()
            found: int | None = None
            if schema_versions.name in present:
                found = connection.scalar(select(schema_versions.c.version))
            if not present:
                metadata.create_all(connection, checkfirst=False)
                connection.execute(insert(schema_versions).values(version=SCHEMA_VERSION))
            elif found != SCHEMA_VERSION:
                has = "no schema version" if found is None else f"schema version {found}"
                raise ConfigError(
                    f"the registry at {self.address} has {has}, but this version of polylora works with schema version "
                    f"{SCHEMA_VERSION} only: a newer version made it, or one from before the first release; run the "
                    "version that made it, or give adapters.registry_url (or adapters.state_dir) an empty place and "
                    "load the adapters again"
                )
            else:
                for index in (index for table in metadata.sorted_tables for index in table.indexes):
                    index.create(connection, checkfirst=True)

    def _registry_id(self) -> str:
        """This registry's random id, drawn when it was new: it tells it from a different registry at the same place."""
        query = select(registries.c.id).where(registries.c.base_digest == self.base_digest)
        with self.write() as connection:
            origin: str | None = connection.scalar(query)
            if origin is None:
                origin = uuid.uuid4().hex
                connection.execute(insert(registries).values(base_digest=self.base_digest, id=origin, revision=0))
            return origin

    @contextmanager
    def _transaction(self, *, lock: str | None) -> Iterator[Connection]:
        """`lock`: what writers take turns at; None: read only. SQLite has one lock for all."""
        try:
            with self._count_open(), self._turn_to_write(lock), self._engine.connect() as connection:
                if self._is_sqlite:
                    connection.exec_driver_sql("BEGIN" if lock is None else "BEGIN IMMEDIATE")
                elif lock is None:
                    connection.execution_options(isolation_level="REPEATABLE READ")
                else:
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_lock_number(lock)})")
                try:
                    yield connection
                except BaseException:
                    self._end(connection, "ROLLBACK")
                    raise
                self._end(connection, "COMMIT")
        except UnicodeEncodeError as error:
            raise _unstorable_text_error() from error
        except SQLAlchemyError as error:
            if isinstance(error, DataError) and getattr(error.orig, "sqlstate", None) in _UNSTORABLE_TEXT:
                raise _unstorable_text_error() from error
            logger.warning("the registry at %s: %s", self.address, getattr(error, "orig", None) or error)
            if type(error) is DatabaseError:  # SQLite raises this for a damaged file
                raise _CorruptDatabase(str(error.orig)) from error
            raise NotReady("the registry's database does not answer; try again", retry_after_s=5) from error

    @contextmanager
    def _turn_to_write(self, lock: str | None) -> Iterator[None]:
        """Wait for this process's other threads, which SQLite would poll for with sleeps of up to 0.1 s."""
        if lock is None or not self._is_sqlite:
            yield
            return
        if not self._writing.acquire(timeout=LOCK_TIMEOUT_S):
            raise NotReady("the registry's database is busy; try again", retry_after_s=5)
        try:
            yield
        finally:
            self._writing.release()

    @contextmanager
    def _count_open(self) -> Iterator[None]:
        with self._idle:
            self._num_open += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_open -= 1
                self._idle.notify_all()

    def _end(self, connection: Connection, how: str) -> None:
        if self._is_sqlite:
            driver: Any = connection.connection.dbapi_connection
            if how == "COMMIT" or driver.in_transaction:  # SQLite rolls back by itself when the disk is full
                connection.exec_driver_sql(how)
        elif how == "COMMIT":
            connection.commit()
        else:
            connection.rollback()


def older_database_error(known_revision: int) -> NotReady:
    """The error of every change while the database is older than what is already published."""
    return NotReady(
        f"the registry's database is older than change {known_revision}, which is already served; nothing was changed: "
        "restore the newer database, or restart the service to accept the older one", retry_after_s=5,
    )  # fmt: skip


class _CorruptDatabase(NotReady):
    """The file is not a database any more; there is no registry until it is restored."""

    def __init__(self, reason: str) -> None:
        super().__init__("the registry's database is damaged; the store's log has the details", retry_after_s=60)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_CorruptDatabase, (self.reason,))


def storable_text(text: str) -> str:
    """A text that every database can store, at most `MAX_TEXT` characters."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def sqlite_url(path: Path) -> str:
    return URL.create("sqlite", database=str(path)).render_as_string()


def _parse_url(url: str) -> URL:
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(f"adapters.registry_url is no database URL: {error}") from error
    if backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed.set(drivername="sqlite")
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    raise ConfigError(
        f"adapters.registry_url {parsed.render_as_string()} is neither a file of SQLite (sqlite:////path) nor "
        "PostgreSQL (postgresql://user@host/database)"
    )


def _postgres_options(url: URL) -> dict[str, Any]:
    """libpq's arguments, so that no call waits forever for a lost server or another's transaction.

    A server that hangs but whose kernel still acknowledges bytes is for `postgres_timeouts`.
    """
    milliseconds = {
        "lock_timeout": LOCK_TIMEOUT_S,
        "statement_timeout": STATEMENT_TIMEOUT_S,
        "idle_in_transaction_session_timeout": STATEMENT_TIMEOUT_S,
    }
    given = url.query.get("options", "")
    options = [*([given] if isinstance(given, str) else given)]
    options += (f"-c {name}={math.ceil(seconds * 1000)}" for name, seconds in milliseconds.items())
    return {
        "options": " ".join(filter(None, options)),
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives": 1,
        "keepalives_idle": SILENCE_TIMEOUT_S // 2,
        "keepalives_interval": SILENCE_TIMEOUT_S // 4,
        "keepalives_count": 2,
        "tcp_user_timeout": SILENCE_TIMEOUT_S * 1000,
    }


def _lock_number(what: str) -> int:
    """A signed 64-bit key for PostgreSQL's advisory locks."""
    return int.from_bytes(hashlib.blake2b(f"polylora {what}".encode(), digest_size=8).digest(), signed=True)


def _unstorable_text_error() -> InvalidRequest:
    return InvalidRequest("a text has characters that cannot be stored (NUL, half a surrogate), or too many")


def _make_file(file: Path) -> None:
    """Create the folder, and the file itself for this user only: SQLite gives its log the file's mode."""
    if file.name in ("", ":memory:"):
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(0o600)
    except OSError as error:
        raise ConfigError(f"the registry {file} cannot be made: {error.strerror}") from error


def _check_same_file(file: Path) -> Callable[[sqlite3.Connection, ConnectionPoolEntry, object], None]:
    """Close a pooled connection if the path now has another file (a restored backup) or none.

    Its changes would go to a file that no one can find any more.
    """

    def check(_: sqlite3.Connection, entry: ConnectionPoolEntry, __: object) -> None:
        try:
            found = file.stat()
        except OSError as error:
            raise DisconnectionError(f"{file} cannot be read: {error.strerror}") from error
        place = found.st_dev, found.st_ino
        if entry.info.setdefault("file", place) != place:
            raise DisconnectionError(f"{file} is another file than before")

    return check


def _use_wal(connection: sqlite3.Connection, _: object) -> None:
    """Set write-ahead logging, so that readers run beside a writer. The mode belongs to the file; every connection sets
    it.

    When several connections open a new file at once, SQLite lets one set the mode and refuses the others without
    waiting.
    """
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
        else:
            return
