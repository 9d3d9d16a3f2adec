"""The registry of adapters: which name means which contents.

In: names, where they came from, the digest of what was found there. Out: `CatalogEntry`s that survive
every process (a database; SQLite in a file by default). A name's generation rises whenever its contents
change and never falls, not even over a removal, so nothing made for an older meaning of a name can be
taken for the present one. Equal contents keep their digest under any name. Reading adapters is left to
the store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Column, Connection, Float, Integer, MetaData, String, Table, create_engine, select
from sqlalchemy.engine import URL
from sqlalchemy.pool import NullPool

from app.engine.adapters.card import AdapterRef

#: How long a call waits for another's transaction.
LOCK_TIMEOUT_S = 30.0

_metadata = MetaData()
_adapters = Table(
    "adapters",
    _metadata,
    Column("tenant_id", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("uri", String, nullable=False),
    Column("digest", String, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("max_rank", Integer, nullable=False),
    Column("size_bytes", Integer, nullable=False),
    Column("registered_s", Float, nullable=False),
    Column("removed", Integer, nullable=False, default=0),
)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One name and what it means now. `registered_s` is Unix time."""

    ref: AdapterRef
    max_rank: int
    size_bytes: int
    registered_s: float


class Catalog:
    """The database. Every call is one transaction; threads and processes may call at the same time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # NullPool: a connection is closed when its transaction ends, so none outlives this object unnoticed.
        self._engine = create_engine(
            URL.create("sqlite", database=str(path)),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",  # `_transaction` says where one begins
            connect_args={"timeout": LOCK_TIMEOUT_S},
        )
        with self._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        with self._transaction() as connection:
            _metadata.create_all(connection)

    def register(
        self, name: str, uri: str, digest: str, *, max_rank: int, size_bytes: int, tenant_id: str = "default"
    ) -> CatalogEntry:
        """Give a name its meaning. The generation rises if the contents differ from the name's last ones."""
        with self._transaction() as connection:
            key = (_adapters.c.tenant_id == tenant_id, _adapters.c.name == name)
            old = connection.execute(select(_adapters).where(*key)).mappings().first()
            generation = 1 if old is None else old["generation"] + (old["digest"] != digest or bool(old["removed"]))
            values = {
                "uri": uri,
                "digest": digest,
                "generation": generation,
                "max_rank": max_rank,
                "size_bytes": size_bytes,
                "registered_s": time.time(),
                "removed": 0,
            }
            if old is None:
                connection.execute(_adapters.insert().values(tenant_id=tenant_id, name=name, **values))
            else:
                connection.execute(_adapters.update().where(*key).values(**values))
        entry = self.get(name, tenant_id=tenant_id)
        assert entry is not None, "it was written a moment ago"
        return entry

    def remove(self, name: str, *, tenant_id: str = "default") -> CatalogEntry | None:
        """Forget a name; its generation is remembered. None if it meant nothing."""
        entry = self.get(name, tenant_id=tenant_id)
        if entry is not None:
            with self._transaction() as connection:
                key = (_adapters.c.tenant_id == tenant_id, _adapters.c.name == name)
                connection.execute(_adapters.update().where(*key).values(removed=1))
        return entry

    def get(self, name: str, *, tenant_id: str = "default") -> CatalogEntry | None:
        return next((entry for entry in self.entries(tenant_id=tenant_id) if entry.ref.name == name), None)

    def entries(self, *, tenant_id: str = "default") -> list[CatalogEntry]:
        """All names with a meaning, in order."""
        query = select(_adapters).where(_adapters.c.tenant_id == tenant_id, _adapters.c.removed == 0)
        with self._transaction() as connection:
            rows = connection.execute(query.order_by(_adapters.c.name)).mappings().all()
        return [
            CatalogEntry(
                AdapterRef(row["name"], row["digest"], row["tenant_id"], row["generation"], row["uri"]),
                row["max_rank"],
                row["size_bytes"],
                row["registered_s"],
            )
            for row in rows
        ]

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """IMMEDIATE: two writers that both read first would otherwise both insert."""
        with self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.exec_driver_sql("ROLLBACK")
                raise
            connection.exec_driver_sql("COMMIT")
