"""All that the database keeps for clients, opened.

In: the registry's database. Out: the parts, which share it and nothing else, and the removal of what has expired.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from app.deployments.object_storage.batches import BatchStore
from app.deployments.object_storage.files import FileStore
from app.deployments.object_storage.responses import ResponseStore
from app.deployments.registry.db.database import Database

#: A batch is told of for so long; its files live 30 days at most, after the day it may take.
BATCH_LIFE_S = 45 * 86_400.0


class Storage:
    """Calls may come from several threads; each is one transaction. `monotonic`: `BatchStore`'s."""

    def __init__(self, database: Database, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self.files = FileStore(database)
        self.batches = BatchStore(database, self.files, monotonic)
        self.responses = ResponseStore(database)

    def sweep(self) -> None:
        """Remove what has expired, some of it."""
        with self._database.write() as connection:
            for row in self.files.expired_rows(connection):
                self.files.forget(connection, row)
            self.batches.forget_before(connection, self._database.clock() - BATCH_LIFE_S)
            self.responses.forget_expired(connection)
