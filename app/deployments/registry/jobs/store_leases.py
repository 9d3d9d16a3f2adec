"""Leases of the processes ("stores") that serve a registry, so that each load has exactly one living worker.

Each store sends a heartbeat every few seconds with the newest revision that all its ingresses have; it learns which
others live, and adopts the loads of dead ones. A store whose row has not changed for `LEASE_S` is dead to the others;
if it lives after all, its writes about those loads are refused (`job_table`). A store that Ray restarts takes over from
its former life at once, by its actor's name. Each store measures with its own monotonic clock: the times in rows alone
make no store dead, since another machine's clock may be wrong; nor does a database outage, or a pause of the observer.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import stores
from app.deployments.registry.jobs.job_table import adopt_loads
from app.deployments.registry.models import RegistryJob

#: The heartbeat interval; a heartbeat is also sent at once when all ingresses have a newer revision.
BEAT_INTERVAL_S = 2.0
#: A store without a heartbeat for so long is dead to the others.
LEASE_S = 8.0
#: If this process has not checked the others for so long, it was stalled: the gap counts as one interval.
STALL_S = LEASE_S / 2
#: The lease of a row that is first seen with an old time: two heartbeats.
FIRST_LEASE_S = 2 * BEAT_INTERVAL_S
#: Ingresses of a store that ended less than this long ago may still run, and will watch the next store.
HANDOVER_S = 60.0
#: How long the row of a dead store stays.
_ROW_RETENTION_S = 86_400.0


class Heartbeat(NamedTuple):
    """`others`: store id -> revision that all its ingresses have, of the other living stores. `adopted`: loads, oldest
    first.
    """

    others: Mapping[str, int]
    adopted: list[RegistryJob]


class _PeerLease(NamedTuple):
    """Another store's last heartbeat, by its clock, and until when it counts as alive, by ours."""

    beat_s: float
    until_s: float


class StoreLeases:
    """One store's membership. Every call is one transaction.

    `actor` names the process over restarts: of two rows with one name, the older belongs to a former life. Empty:
    unknown.
    """

    def __init__(self, database: Database, actor: str = "", monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._actor = actor
        self._monotonic = monotonic
        self._peers: dict[str, _PeerLease] = {}  # other stores by id
        self._last_check_s = math.inf  # by our clock
        self._peers_lock = threading.Lock()
        self.id = uuid.uuid4().hex
        self._has_entered = False
        self.replaces_another = False  # whether ingresses of another life or store may still run; set by `enter`
        self.settings: str | None = None  # the last settings of this actor's former life

    def enter(self) -> None:
        """Insert this store's row, once; adopts no loads yet."""
        if self._has_entered:
            return
        self._has_entered = True
        now_s = self._database.clock()
        with self._database.write() as connection:
            for row in connection.execute(select(stores).where(self._ours())).mappings().all():
                self.replaces_another |= row["beat_s"] > now_s - HANDOVER_S
                if self._actor and row["actor"] == self._actor:
                    self.replaces_another = True  # Ray needs over a minute to find that a silent node has died
                    self.settings = row["settings"]
                    connection.execute(delete(stores).where(self._ours(), stores.c.id == row["id"]))
            self._insert(connection, now_s, 0)

    def beat(self, revision: int) -> Heartbeat:
        """Send a heartbeat: all ingresses of this store have `revision`. Raises NotReady."""
        now_s = self._database.clock()
        with self._database.write() as connection:
            mine = update(stores).where(self._ours(), stores.c.id == self.id)
            if not connection.execute(mine.values(beat_s=now_s, revision=revision)).rowcount:
                self._insert(connection, now_s, revision)  # another life of the same actor has deleted the row
            others = self._others(connection, now_s)
            is_dead = stores.c.id.not_in([self.id, *others])
            connection.execute(delete(stores).where(self._ours(), is_dead, stores.c.beat_s < now_s - _ROW_RETENTION_S))
            return Heartbeat(others, adopt_loads(connection, self._database, self.id, {self.id, *others}))

    def others(self) -> Mapping[str, int]:
        """Store id -> revision that all its ingresses have, of the other living stores."""
        with self._database.read() as connection:
            return self._others(connection, self._database.clock())

    def save_settings(self, settings: str) -> None:
        """Store the settings for the next life of this actor."""
        with self._database.write() as connection:
            connection.execute(update(stores).where(self._ours(), stores.c.id == self.id).values(settings=settings))
        self.settings = settings

    def leave(self) -> None:
        """This store ends: others may adopt its loads at once."""
        with self._database.write() as connection:
            connection.execute(update(stores).where(self._ours(), stores.c.id == self.id).values(beat_s=0.0))

    def _insert(self, connection: Connection, now_s: float, revision: int) -> None:
        connection.execute(
            insert(stores).values(
                base_digest=self._database.base_digest,
                id=self.id,
                actor=self._actor,
                beat_s=now_s,
                revision=revision,
                settings=self.settings,
            )
        )

    def _others(self, connection: Connection, wall_s: float) -> Mapping[str, int]:
        query = select(stores.c.id, stores.c.revision, stores.c.beat_s).where(self._ours(), stores.c.id != self.id)
        rows = connection.execute(query).all()
        with self._peers_lock:
            before, now_s = self._peers, self._monotonic()
            unseen_s, self._last_check_s = now_s - self._last_check_s, now_s
            unseen_s = unseen_s - BEAT_INTERVAL_S if unseen_s > STALL_S else 0.0
            self._peers = {}
            for row in rows:
                seen = before.get(row.id)
                if row.beat_s == 0.0:
                    until_s = -math.inf  # it has left
                elif seen is None:
                    until_s = now_s + max(FIRST_LEASE_S, LEASE_S - max(0.0, wall_s - row.beat_s))
                elif seen.beat_s == row.beat_s:
                    until_s = seen.until_s + unseen_s
                else:
                    until_s = now_s + LEASE_S
                self._peers[row.id] = _PeerLease(row.beat_s, until_s)
            return {row.id: row.revision for row in rows if self._peers[row.id].until_s >= now_s}

    def _ours(self) -> ColumnElement[bool]:
        return stores.c.base_digest == self._database.base_digest
