"""The registry's database: where it is, its transactions, its schema.

In: a URL (a file of SQLite, or PostgreSQL) and the base model whose registry this is. Out: transactions.
Writers take turns in every database, so that what one has read is still true when it writes; readers wait
for nobody. Missing revisions are applied when the object is made, in one transaction, once however many
processes start together. What the rows mean is left to the modules beside this one.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, event, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DataError, InternalError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import NullPool

from app.deployments.registry.tables import adapters
from app.engine.errors import ConfigError, InvalidRequest, NotReady

#: How long a call waits for another's transaction.
LOCK_TIMEOUT_S = 30.0
#: Connections to PostgreSQL kept open. Calls come from a few threads of one process.
POOL_SIZE = 4
#: A reason may quote a file: this much of it is kept.
MAX_TEXT = 2000
#: "polylora" as a number: PostgreSQL's lock that writers of all our registries in one database take turns with.
_WRITER_LOCK = 0x706F6C796C6F7261


class Database:
    """Every call is one transaction; threads and processes may call at the same time."""

    def __init__(self, url: str, base_digest: str, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives the Unix times that are written down.

        Raises ConfigError for a URL or a schema that cannot be used, NotReady if nobody answers there.
        """
        self.base_digest = base_digest
        self.clock = clock
        parsed = _checked(url)
        self.address = parsed.render_as_string(hide_password=True)
        self._is_sqlite = parsed.get_backend_name() == "sqlite"
        options: dict[str, Any]
        if self._is_sqlite:
            _make_folder_of(Path(parsed.database or ""))
            # NullPool: a connection is closed when its transaction ends, so none outlives this object unnoticed.
            # AUTOCOMMIT: `_transaction` says where one begins, which pysqlite by itself does late.
            options = {
                "poolclass": NullPool,
                "isolation_level": "AUTOCOMMIT",
                "connect_args": {"timeout": LOCK_TIMEOUT_S},
            }
        else:
            options = {"pool_size": POOL_SIZE, "pool_pre_ping": True}
        try:
            self._engine = create_engine(parsed, **options)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"adapters.registry_url needs {error.name}, which is not installed; pip install 'polylora[postgres]'"
            ) from error
        if self._is_sqlite:
            event.listen(self._engine, "connect", _write_ahead)
        try:
            self._upgrade()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view. Raises NotReady while the database does not answer, InvalidRequest for no text."""
        with self._transaction(writes=False) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Nobody else writes meanwhile. Raises as `read`."""
        with self._transaction(writes=True) as connection:
            yield connection

    def close(self) -> None:
        self._engine.dispose()

    def _upgrade(self) -> None:
        config = Config()
        folder = Path(__file__).with_name("migrations")
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        with self.write() as connection:
            self._check_revision(connection, config)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def _check_revision(self, connection: Connection, config: Config) -> None:
        """Raises ConfigError for a schema that no revision of ours made: it is left as it is."""
        present = MigrationContext.configure(connection).get_current_revision()
        if present is None and inspect(connection).has_table(adapters.name):
            present = "none"  # made before there were revisions
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if present is not None and present not in known:
            raise ConfigError(
                f"the registry at {self.address} has schema revision {present!r}, but this version of polylora knows "
                f"{', '.join(sorted(known))} only: a newer version made it, or one from before the first release; run "
                "the version that made it, or give adapters.registry_url (or adapters.state_dir) an empty place and "
                "load the adapters again"
            )

    @contextmanager
    def _transaction(self, *, writes: bool) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                if self._is_sqlite:
                    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
                elif writes:
                    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITER_LOCK})")
                try:
                    yield connection
                except BaseException:
                    self._end(connection, "ROLLBACK")
                    raise
                self._end(connection, "COMMIT")
        except (OperationalError, InternalError) as error:  # internal: PostgreSQL's, for a server that only reads
            raise NotReady(
                f"the registry's database at {self.address} does not answer: {error.orig}", retry_after_s=5
            ) from error
        except (DataError, UnicodeEncodeError) as error:
            raise InvalidRequest("a text has characters that no database keeps (NUL, half a surrogate)") from error
        except DatabaseError as error:
            if type(error) is not DatabaseError:
                raise
            # SQLite's, for a file that is not what it wrote.
            raise ConfigError(
                f"the registry at {self.address} is damaged ({error.orig}); restore a copy of it"
            ) from error

    def _end(self, connection: Connection, how: str) -> None:
        if self._is_sqlite:
            driver: Any = connection.connection.dbapi_connection
            if how == "COMMIT" or driver.in_transaction:  # when the disk is full SQLite has rolled back itself
                connection.exec_driver_sql(how)
        elif how == "COMMIT":
            connection.commit()
        else:
            connection.rollback()


def storable(text: str) -> str:
    """Words for people as every database keeps them, at most `MAX_TEXT` characters."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def sqlite_url(path: Path) -> str:
    return URL.create("sqlite", database=str(path)).render_as_string()


def _checked(url: str) -> URL:
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


def _make_folder_of(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the registry's folder {file.parent} cannot be made: {error.strerror}") from error


def _write_ahead(connection: sqlite3.Connection, _: object) -> None:
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
