"""Which processes serve a registry: exactly one of them works on each load, and all of them tell their ingresses.

In: a beat of each process every few seconds, with the newest revision that all its ingresses hold. Out: the others that
live, and the loads whose process has died, which are this one's now. A process whose row has not changed for `LEASE_S`
is dead to the others; should it live after all, what it writes about those loads is refused (`jobs`). One that Ray has
restarted takes over from itself at once: its actor is the same. Rule: each process measures that time with a clock of
its own that is never set. By the time that stands in a row alone nobody is dead, for another machine's clock may be
wrong; nor because the database was away for everybody, or this process stood still and has looked at nobody.
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

#: A process says so often that it lives, and at once when all its ingresses hold something newer.
BEAT_INTERVAL_S = 2.0
#: One that has not said so for so long is dead to the others.
LEASE_S = 8.0
#: A process that has not looked at the others for so long was not able to: that time counts as one beat's.
STALL_S = LEASE_S / 2
#: A row that is seen for the first time, and whose time is long ago, is a dead one's if it says nothing for two beats.
FIRST_LEASE_S = 2 * BEAT_INTERVAL_S
#: Ingresses of a store that ended less than this long ago may still be there, and come to the next one.
FOLLOWING_S = 60.0
#: How long the row of a dead process is kept.
_ROW_RETENTION_S = 86_400.0


class Heartbeat(NamedTuple):
    """`others`: the revision that the ingresses of each other living process hold. `adopted`: loads, oldest first."""

    others: Mapping[str, int]
    adopted: list[RegistryJob]


class _PeerLease(NamedTuple):
    """When a process said last that it lives, by its clock, and until when that counts, by ours."""

    beat_s: float
    until_s: float


class StoreLeases:
    """One process's place among those that serve a registry. Every call is one transaction.

    `actor` names the process over restarts; of two with one name the older was restarted. Empty: nothing is known of
    that.
    """

    def __init__(self, database: Database, actor: str = "", monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._actor = actor
        self._monotonic = monotonic
        self._peers: dict[str, _PeerLease] = {}  # each other process by its id
        self._last_check_s = math.inf  # when they were looked at last; by ours
        self._peers_lock = threading.Lock()
        self.id = uuid.uuid4().hex
        self._has_entered = False
        self.follows_another = (
            False  # a moment ago another process served this registry: known once this one has entered
        )
        self.settings: str | None = None  # what the actor was last told in its former life

    def enter(self) -> None:
        """Take a place, once. Loads are not taken over yet."""
        if self._has_entered:
            return
        self._has_entered = True
        now_s = self._database.clock()
        with self._database.write() as connection:
            for row in connection.execute(select(stores).where(self._ours())).mappings().all():
                self.follows_another |= row["beat_s"] > now_s - FOLLOWING_S
                if self._actor and row["actor"] == self._actor:
                    self.settings = row["settings"]
                    connection.execute(delete(stores).where(self._ours(), stores.c.id == row["id"]))
            self._insert(connection, now_s, 0)

    def beat(self, revision: int) -> Heartbeat:
        """This process lives, and all its ingresses hold this revision. Raises NotReady."""
        now_s = self._database.clock()
        with self._database.write() as connection:
            mine = update(stores).where(self._ours(), stores.c.id == self.id)
            if not connection.execute(mine.values(beat_s=now_s, revision=revision)).rowcount:
                self._insert(connection, now_s, revision)  # a process of the same name took this one for dead
            others = self._others(connection, now_s)
            is_dead = stores.c.id.not_in([self.id, *others])
            connection.execute(delete(stores).where(self._ours(), is_dead, stores.c.beat_s < now_s - _ROW_RETENTION_S))
            return Heartbeat(others, adopt_loads(connection, self._database, self.id, {self.id, *others}))

    def others(self) -> Mapping[str, int]:
        """The revision that the ingresses of each other living process hold."""
        with self._database.read() as connection:
            return self._others(connection, self._database.clock())

    def save_settings(self, settings: str) -> None:
        """Have the next life of this actor know what it was told in this one."""
        with self._database.write() as connection:
            connection.execute(update(stores).where(self._ours(), stores.c.id == self.id).values(settings=settings))
        self.settings = settings

    def leave(self) -> None:
        """This process ends: its loads are another's at once."""
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
