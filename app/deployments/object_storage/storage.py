"""Object storage, opened: its stores share the registry's database and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.deployments.object_storage.batches import BatchStore
from app.deployments.object_storage.files import FileStore
from app.deployments.object_storage.responses import ResponseStore
from app.deployments.registry.db.database import Database

#: How long a batch is listed. Its files live 30 days at most, after the day that it may run.
BATCH_LIFE_S = 45 * 86_400.0


class Storage:
    """Callable from several threads; each call is one transaction. `monotonic` is for `BatchStore`."""

    def __init__(self, database: Database, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self.files = FileStore(database)
        self.batches = BatchStore(database, self.files, monotonic)
        self.responses = ResponseStore(database)

    def sweep(self) -> None:
        """Delete expired objects, up to 100 of each kind."""
        with self._database.write() as connection:
            for row in self.files.expired_rows(connection):
                self.files.forget(connection, row)
            self.batches.forget_before(connection, self._database.clock() - BATCH_LIFE_S)
            self.responses.forget_expired(connection)
