"""The registry's database: where it is, its transactions, its schema.

In: a URL (a file of SQLite, or PostgreSQL) and the base model whose registry this is. Out: transactions. Writers take
turns in every database, so that what one has read is still true when it writes; readers wait for nobody, and everything
ends in bounded time. In an empty database the tables are made with the object, in one transaction, once however many
processes start together; those of another version are refused and left as they are. Whatever a database does that we
did not ask for is `NotReady` in a fixed sentence: its own words, which may name hosts and users, are for the log. What
the rows mean is left to the modules beside this one.
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

#: How long a call waits for another's transaction.
LOCK_TIMEOUT_S = 30.0
#: How long a call waits for a connection to PostgreSQL: for a new one, or for one of the pool to come free.
CONNECT_TIMEOUT_S = 5
#: How long one statement may take, and how long the server keeps a transaction whose client says nothing.
STATEMENT_TIMEOUT_S = 60
#: So much longer than a statement may take we wait for the server to say that it took too long.
GRACE_S = 10.0
#: How long bytes may stay unacknowledged before a connection counts as lost; a quiet one is tried after half of it.
SILENCE_TIMEOUT_S = 20
#: Connections kept open. Calls come from a few threads of one process.
POOL_SIZE = 4
#: A reason may quote a file: this much of it is kept.
MAX_TEXT = 2000
#: What PostgreSQL calls a text that it cannot keep: no character of the encoding, too long. None: psycopg itself said
#: so.
_UNSTORABLE_TEXT = (None, "22021", "22P05", "22001")


class Database:
    """Every call is one transaction; threads and processes may call at the same time."""

    def __init__(self, url: str, base_digest: str, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives the Unix times that are written down.

        Raises ConfigError for a URL or a schema that cannot be used, NotReady if nobody answers there.
        """
        self.base_digest = base_digest
        self.clock = clock
        self.known_revision = 0  # of the newest change that this process has seen; the caller's to set
        parsed = _parse_url(url)
        self.address = parsed.render_as_string(hide_password=True)
        self._num_open, self._idle = 0, threading.Condition()
        self._is_sqlite = parsed.get_backend_name() == "sqlite"
        options: dict[str, Any]
        if self._is_sqlite:
            _make_parent(Path(parsed.database or ""))
            # Connections are kept: to open one takes ten times what most transactions do, and when the last is closed
            # SQLite writes its log back into the file. No bound on how many there are at a time: nobody waits for one.
            # AUTOCOMMIT: `_transaction` says where one begins, which pysqlite by itself does late.
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
                    PostgresTimeouts,  # psycopg: only where it is asked for
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
        """One consistent view. Raises NotReady while the database does not answer, InvalidRequest for no text."""
        with self._transaction(lock=None) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Nobody else writes to this base model's registry meanwhile. Raises as `read`."""
        with self._transaction(lock=self.base_digest) as connection:
            yield connection

    def next_revision(self, connection: Connection) -> int:
        """The number of a change that the caller's transaction makes (`revisions`).

        Raises NotReady, so that the transaction is undone, for a number that has been another change's: the database is
        an older copy of what it was.
        """
        mine = update(registries).where(registries.c.base_digest == self.base_digest)
        raised = mine.values(revision=registries.c.revision + 1).returning(registries.c.revision)
        revision: int = connection.execute(raised).scalar_one()
        if revision <= self.known_revision:
            raise older_database_error(self.known_revision)
        return revision

    def close(self) -> None:
        """Blocks until transactions in other threads have ended, for as long as one may take."""
        with self._idle:
            self._idle.wait_for(lambda: self._num_open == 0, STATEMENT_TIMEOUT_S)
        self._engine.dispose()

    def _create_schema(self) -> None:
        """Make the tables in an empty database. Raises ConfigError if it has those of another version."""
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

    def _registry_id(self) -> str:
        """What tells this registry from every other, one at the same place included: drawn when it was new."""
        query = select(registries.c.id).where(registries.c.base_digest == self.base_digest)
        with self.write() as connection:
            origin: str | None = connection.scalar(query)
            if origin is None:
                origin = uuid.uuid4().hex
                connection.execute(insert(registries).values(base_digest=self.base_digest, id=origin, revision=0))
            return origin

    @contextmanager
    def _transaction(self, *, lock: str | None) -> Iterator[Connection]:
        """`lock`: what writers take turns at; None: it only reads. SQLite has one turn for all."""
        try:
            with self._count_open(), self._engine.connect() as connection:
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
            if type(error) is DatabaseError:  # SQLite's, for a file that is not what it wrote
                raise _CorruptDatabase(str(error.orig)) from error
            raise NotReady(
                "the registry's database does not answer as it should; ask again", retry_after_s=5
            ) from error

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
            if how == "COMMIT" or driver.in_transaction:  # when the disk is full SQLite has rolled back itself
                connection.exec_driver_sql(how)
        elif how == "COMMIT":
            connection.commit()
        else:
            connection.rollback()


def older_database_error(known_revision: int) -> NotReady:
    """What everybody is told while the database is older than what is known of it."""
    return NotReady(
        f"the registry's database is older than change {known_revision}, which is served; nothing is changed: restore "
        "the newer one, or restart the service to have it take the older", retry_after_s=5,
    )  # fmt: skip


class _CorruptDatabase(NotReady):
    """A file that is no database any more. Until it is restored there is no registry."""

    def __init__(self, reason: str) -> None:
        super().__init__("the registry's database is damaged; its log says how", retry_after_s=60)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_CorruptDatabase, (self.reason,))


def storable_text(text: str) -> str:
    """Words for people as every database keeps them, at most `MAX_TEXT` characters."""
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
    """libpq's arguments: no call waits without end for a server that is gone, or for another's transaction.

    For one that stands still see `patient`.
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
    """64 bits with a sign, as PostgreSQL's advisory locks have them."""
    return int.from_bytes(hashlib.blake2b(f"polylora {what}".encode(), digest_size=8).digest(), signed=True)


def _unstorable_text_error() -> InvalidRequest:
    return InvalidRequest("a text has characters that no database keeps (NUL, half a surrogate), or too many")


def _make_parent(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the registry's folder {file.parent} cannot be made: {error.strerror}") from error


def _check_same_file(file: Path) -> Callable[[sqlite3.Connection, ConnectionPoolEntry, object], None]:
    """Closes a kept connection whose file is no longer the one at this path: a backup was put there, or it was removed.

    Its changes would be in a file that nobody can find any more.
    """

    def check(_: sqlite3.Connection, entry: ConnectionPoolEntry, __: object) -> None:
        try:
            found = file.stat()
        except OSError as error:
            raise DisconnectionError(f"{file} cannot be looked at: {error.strerror}") from error
        place = found.st_dev, found.st_ino
        if entry.info.setdefault("file", place) != place:
            raise DisconnectionError(f"{file} is another file than before")

    return check


def _use_wal(connection: sqlite3.Connection, _: object) -> None:
    """Readers beside one writer. The mode is the file's; it is set once, and asked for by every connection.

    Of several that open a new file at once SQLite lets one set it, and refuses the others without its own wait.
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
