"""Which name means which contents.

In: names, where they came from, the digest of what was found there. Out: `CatalogEntry`s that survive
every process. A name's generation rises whenever its contents change and never falls, not even over a
removal, so nothing made for an older meaning of a name can be taken for the present one. Equal contents
keep their digest under any name. Adapters and aliases share one namespace. Reading adapters is left to
the store.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Table, and_, insert, select, update

from app.deployments.registry.aliases import aliases_to, is_alias
from app.deployments.registry.database import Database
from app.deployments.registry.entries import MEANT_STATES, CatalogEntry, Generation, RegistryJob, State, cannot_pin
from app.deployments.registry.jobs import cancel_loads, check_turn, insert_job, update_job
from app.deployments.registry.journal import NewEvent, record_audit, record_events
from app.deployments.registry.pins import PinLimits
from app.deployments.registry.tables import adapters, generations, named, uses
from app.deployments.registry.tier_events import Move
from app.deployments.registry.use import forget_use, note_uses
from app.deployments.registry.view import Entry, Key
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.composing.composition import shown_source
from app.engine.errors import AdapterBusy, InvalidRequest, NotFound

#: Rows fetched at a time: a server ends a transaction whose client says nothing while it makes entries of a million.
_READ_AT_ONCE = 5_000
#: A new replica is offered the last used of so many contents.
MAX_HOT = 1024

_SAME_CONTENTS = and_(uses.c.base_digest == adapters.c.base_digest, uses.c.digest == adapters.c.digest)


class Drained(NamedTuple):
    """What an unload began with; it is over if its job has no digest.

    `entry` None: there was none yet. `cancelled`: jobs of loads of the name.
    """

    entry: CatalogEntry | None
    job: RegistryJob
    cancelled: Sequence[str]


class Catalog:
    """Every call is one transaction; threads and processes may call at the same time. `pin_limits` may be replaced."""

    def __init__(self, database: Database, pin_limits: PinLimits = PinLimits()) -> None:  # noqa: B008  (frozen)
        self._database = database
        self._base = database.base_digest
        self.pin_limits = pin_limits
        #: Asked in the transaction that registers an adapter of a tenant, after the change. Raises to undo it.
        self.check_quota: Callable[[Connection, str], None] = lambda *_: None

    def register(
        self,
        name: str,
        uri: str,
        digest: str,
        *,
        max_rank: int,
        size_bytes: int,
        extra_bytes: int = 0,
        text: str = "",
        description: str = "",
        invocation_tokens: Sequence[int] = (),
        card_metadata: str = "",
        tenant_id: str,
        who: str,
        pinned: bool | None = None,
        traffic_weight: float | None = None,
        source: str | None = None,
        job: RegistryJob | None = None,
    ) -> CatalogEntry:
        """Give a name its meaning. The generation rises if the contents differ from the name's last ones.

        `pinned` and `traffic_weight` None: as they were. `source` is how the caller called the place. Raises
        InvalidRequest if an alias has the name, AdapterTooLarge if no engine could hold it or if it would be pinned and
        does not fit, AdapterUnloaded if `job`, the load that it is for, was cancelled, LoadsAhead if another comes
        before it, NotReady if another process works on it by now.
        """
        self.pin_limits.alone.check(name, max_rank, extra_bytes)
        key = self._named(adapters, tenant_id, name)
        with self._database.write() as connection:
            if job is not None:
                check_turn(connection, self._base, job)
            if is_alias(connection, self._base, tenant_id, name):
                raise InvalidRequest(f"{name!r} is an alias; remove the alias or choose another name", param="name")
            old = connection.execute(select(adapters).where(*key)).mappings().first()
            is_back = old is None or old["state"] != State.LOADED
            generation = 1 if old is None else old["generation"] + (old["digest"] != digest or is_back)
            now_s = self._database.clock()
            contents = {
                "generation": generation,
                "digest": digest,
                "uri": uri,
                "max_rank": max_rank,
                "size_bytes": size_bytes,
                "registered_s": now_s,
            }
            before: Mapping[Any, Any] = {} if old is None or old["state"] not in MEANT_STATES else old
            values = contents | {
                "state": State.LOADED,
                "source": uri if source is None else source,
                "extra_bytes": extra_bytes,
                "text": text,
                "description": description,
                "invocation_tokens": " ".join(map(str, invocation_tokens)),
                "metadata": card_metadata,
                "owner": before.get("owner", who),
                "pinned": before.get("pinned", False) if pinned is None else pinned,
                "traffic_weight": before.get("traffic_weight", 1.0) if traffic_weight is None else traffic_weight,
                "revision": self._database.next_revision(connection),
            }
            place = {"base_digest": self._base, "tenant_id": tenant_id, "name": name}
            if old is None:
                connection.execute(insert(adapters).values(**place, **values))
            else:
                connection.execute(update(adapters).where(*key).values(**values))
            if old is None or generation != old["generation"]:
                connection.execute(insert(generations).values(**place, **contents, registered_by=who))
            shown = shown_source(uri)
            record_audit(
                connection, self._database, who, "load", name, tenant_id, {"uri": shown, "generation": generation}
            )
            record_events(
                connection, self._database, [NewEvent("registered", name, tenant_id, generation, digest, detail=shown)]
            )
            self._check_pins(connection, name, bool(values["pinned"]))
            self.check_quota(connection, tenant_id)
            row = connection.execute(select(adapters).where(*key)).mappings().one()
            if old is not None and old["digest"] != digest:
                forget_use(connection, self._base, old["digest"])
        return entry_of(row)

    def drain(self, name: str, *, tenant_id: str, who: str) -> Drained:
        """Take a name out of service, and cancel the loads of it that were asked for; its generation is remembered.

        The job is unfinished until `drained` ends it, unless there was nothing but loads to cancel.
        Raises NotFound, and AdapterBusy while an alias sends requests to it.
        """
        key = self._named(adapters, tenant_id, name)
        now_s = self._database.clock()
        with self._database.write() as connection:
            cancelled = cancel_loads(connection, self._database, tenant_id, name)
            query = select(adapters).where(*key, adapters.c.state.in_(MEANT_STATES))
            row = connection.execute(query).mappings().first()
            if row is None and not cancelled:
                raise not_registered(name)
            users = aliases_to(connection, self._base, tenant_id, name)
            if row is not None and users:
                raise AdapterBusy(
                    f"alias {users[0]!r} sends requests to adapter {name!r}; promote or remove the alias first"
                )
            revision = self._database.next_revision(connection)
            if row is None or row["state"] == State.REGISTERED:  # nobody has it to give up
                if row is not None:
                    connection.execute(update(adapters).where(*key).values(state=State.REMOVED, revision=revision))
                job = RegistryJob(
                    uuid.uuid4().hex, name, "unload", "", State.REMOVED, who, now_s, now_s,
                    tenant_id=tenant_id, number=revision,
                )  # fmt: skip
                insert_job(connection, self._database, job)
                record_audit(connection, self._database, who, "unload", name, tenant_id, {"cancelled": cancelled})
                return Drained(None if row is None else entry_of(row), job, cancelled)
            connection.execute(update(adapters).where(*key).values(state=State.DRAINING, revision=revision))
            generation, digest = row["generation"], row["digest"]
            job = RegistryJob(
                uuid.uuid4().hex, name, "unload", row["uri"], State.DRAINING, who, now_s, now_s,
                generation=generation, digest=digest, tenant_id=tenant_id, number=revision,
            )  # fmt: skip
            insert_job(connection, self._database, job)
            record_audit(connection, self._database, who, "unload", name, tenant_id, {"generation": generation})
            record_events(connection, self._database, [NewEvent("draining", name, tenant_id, generation, digest)])
        return Drained(entry_of(row), job, cancelled)

    def drained(self, job: RegistryJob) -> RegistryJob:
        """An unload is complete, and so is the name's removal, unless it has been registered again meanwhile."""
        after = replace(job, state=State.REMOVED, updated_s=self._database.clock())
        key = self._named(adapters, job.tenant_id, job.name)
        with self._database.write() as connection:
            update_job(connection, after)
            done = connection.execute(
                update(adapters)
                .where(*key, adapters.c.state == State.DRAINING, adapters.c.generation == job.generation)
                .values(state=State.REMOVED)
            )
            if done.rowcount:
                event = NewEvent("removed", job.name, job.tenant_id, job.generation, job.digest)
                record_events(connection, self._database, [event])
                forget_use(connection, self._base, job.digest)
        return after

    def configure(
        self,
        name: str,
        *,
        pinned: bool | None = None,
        traffic_weight: float | None = None,
        description: str | None = None,
        tenant_id: str,
        who: str,
    ) -> CatalogEntry:
        """Change how a name is treated; None leaves a value as it is.

        Raises NotFound, AdapterTooLarge for a pin that does not fit beside the others, InvalidRequest for a pin of what
        is not read.
        """
        asked = {"pinned": pinned, "traffic_weight": traffic_weight, "description": description}
        changes = {field: value for field, value in asked.items() if value is not None}
        key = self._named(adapters, tenant_id, name)
        with self._database.write() as connection:
            old = self._living(connection, tenant_id, name)
            if pinned and old["state"] == State.REGISTERED:
                raise cannot_pin(name)
            if changes:
                revision = self._database.next_revision(connection)
                connection.execute(update(adapters).where(*key).values(**changes, revision=revision))
                self._check_pins(connection, name, bool(pinned))
                record_audit(connection, self._database, who, "configure", name, tenant_id, changes)
            if pinned is not None and pinned != old["pinned"]:
                event = "pinned" if pinned else "unpinned"
                news = NewEvent(event, name, tenant_id, old["generation"], old["digest"])
                record_events(connection, self._database, [news])
            return entry_of(connection.execute(select(adapters).where(*key)).mappings().one())

    def get(self, name: str, *, tenant_id: str) -> CatalogEntry | None:
        """What a name means, and when that was last used; of one that is not read yet, where it is."""
        query = (
            select(adapters, uses.c.last_used_s)
            .outerjoin(uses, _SAME_CONTENTS)
            .where(*self._named(adapters, tenant_id, name), adapters.c.state.in_(MEANT_STATES))
        )
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else entry_of(row)

    def entries(self, *, tenant_id: str | None = None) -> list[CatalogEntry]:
        """All names with a meaning, in order: one tenant's, or everybody's."""
        return self._select(*(() if tenant_id is None else (adapters.c.tenant_id == tenant_id,)))

    def pinned(self) -> list[CatalogEntry]:
        return self._select(adapters.c.pinned)

    def is_used(self, digest: str) -> bool:
        """Whether any name means these contents."""
        return bool(self._select(adapters.c.digest == digest))

    def generations(self, name: str, *, tenant_id: str) -> list[Generation]:
        """Everything a name has meant, newest first."""
        query = select(generations).where(*self._named(generations, tenant_id, name))
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(generations.c.generation.desc())).mappings().all()
        return [
            Generation(_ref(row), row["max_rank"], row["size_bytes"], row["registered_s"], row["registered_by"])
            for row in rows
        ]

    def note_use(self, last_used_s: Mapping[str, float]) -> None:
        """When requests last used which contents (Unix time); an older time than is known changes nothing."""
        with self._database.write() as connection:
            note_uses(connection, self._base, last_used_s)

    def note_residency(self, replica_id: str, loaded: Sequence[str], unloaded: Sequence[str]) -> None:
        """A replica's device holds these digests, or holds them no more: an event for each name that means them."""
        now_s = self._database.clock()
        moves = [Move("loaded to device", digest, now_s) for digest in loaded]
        moves += [Move("unloaded from device", digest, now_s) for digest in unloaded]
        self.note_moves(moves, replica_id)

    def note_moves(self, moves: Sequence[Move], replica_id: str | None = None) -> None:
        """An event for each name that means, or meant last, what moved."""
        if not moves:
            return
        query = select(adapters).where(
            adapters.c.base_digest == self._base, adapters.c.digest.in_({move.digest for move in moves})
        )
        with self._database.write() as connection:
            rows = connection.execute(query).mappings().all()
            news = [
                NewEvent(
                    move.event,
                    row["name"],
                    row["tenant_id"],
                    row["generation"],
                    move.digest,
                    replica_id=replica_id,
                    time_s=move.time_s,
                )
                for move in moves
                for row in rows
                if row["digest"] == move.digest
            ]
            record_events(connection, self._database, news)

    def hot(self, limit: int) -> list[CatalogEntry]:
        """Registered adapters by last use, the hottest first; each digest once.

        Place n in the order of use counts as n over the traffic weight; weight 0 comes last.
        """
        hottest = (
            select(uses.c.digest, uses.c.last_used_s)
            .where(uses.c.base_digest == self._base)
            .order_by(uses.c.last_used_s.desc(), uses.c.digest)
            .limit(MAX_HOT)
            .subquery()
        )
        query = (
            select(adapters, hottest.c.last_used_s)
            .join(hottest, hottest.c.digest == adapters.c.digest)
            .where(adapters.c.base_digest == self._base, adapters.c.state == State.LOADED)
            .order_by(hottest.c.last_used_s.desc(), adapters.c.tenant_id, adapters.c.name)
        )
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        places = {digest: place for place, digest in enumerate(dict.fromkeys(row["digest"] for row in rows))}
        weights: dict[str, float] = {}
        for row in rows:
            weights[row["digest"]] = max(weights.get(row["digest"], 0.0), row["traffic_weight"])
        rows = sorted(rows, key=lambda row: _quotient(places[row["digest"]] + 1, weights[row["digest"]]))
        entries: dict[str, CatalogEntry] = {}
        for row in rows:
            entries.setdefault(row["digest"], entry_of(row))
        return list(entries.values())[:limit]

    def _check_pins(self, connection: Connection, name: str, pinned: bool) -> None:
        """After a change, before it counts."""
        if not pinned:
            return
        query = select(adapters).where(
            adapters.c.base_digest == self._base, adapters.c.state == State.LOADED, adapters.c.pinned
        )
        self.pin_limits.check(name, map(entry_of, connection.execute(query).mappings()))

    def _select(self, *where: ColumnElement[bool]) -> list[CatalogEntry]:
        query = select(adapters).where(adapters.c.base_digest == self._base, adapters.c.state == State.LOADED, *where)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(adapters.c.tenant_id, adapters.c.name)).mappings().all()
        return [entry_of(row) for row in rows]

    def _living(self, connection: Connection, tenant_id: str, name: str) -> Mapping[Any, Any]:
        named_so = (*self._named(adapters, tenant_id, name), adapters.c.state.in_(MEANT_STATES))
        row = connection.execute(select(adapters).where(*named_so)).mappings().first()
        if row is None:
            raise not_registered(name)
        return row

    def _named(self, table: Table, tenant_id: str, name: str) -> Sequence[ColumnElement[bool]]:
        return named(table, self._base, tenant_id, name)


def changed_adapters(connection: Connection, base_digest: str, after: int) -> list[tuple[int, Key, Entry | None]]:
    """(revision, name, adapter or None where it is gone) of changes after a revision; after 0 nothing that is gone."""
    query = select(adapters).where(adapters.c.base_digest == base_digest)
    order: Sequence[ColumnElement[Any]] = (adapters.c.tenant_id, adapters.c.name)
    if after:  # by the index that finds them: a cursor of PostgreSQL would walk all names in their order instead
        query, order = query.where(adapters.c.revision > after), (adapters.c.revision, *order)
    else:
        query = query.where(adapters.c.state.in_(MEANT_STATES))
    query = query.execution_options(yield_per=_READ_AT_ONCE)
    return [
        (row["revision"], (row["tenant_id"], row["name"]), entry_of(row) if row["state"] in MEANT_STATES else None)
        for row in connection.execute(query.order_by(*order)).mappings()
    ]


def not_registered(name: str) -> NotFound:
    """What to raise for a name that means nothing."""
    return NotFound(f"no adapter is registered as {name[:80]!r}; GET /v1/loras lists the registered ones")


def _ref(row: Mapping[Any, Any]) -> AdapterRef:
    return AdapterRef(row["name"], row["digest"], row["tenant_id"], row["generation"], row["uri"])


def entry_of(row: Mapping[Any, Any]) -> CatalogEntry:
    """A row of `adapters`."""
    return CatalogEntry(
        ref=_ref(row),
        max_rank=row["max_rank"],
        size_bytes=row["size_bytes"],
        registered_s=row["registered_s"],
        owner=row["owner"],
        pinned=row["pinned"],
        traffic_weight=row["traffic_weight"],
        last_used_s=row.get("last_used_s"),
        source=row["source"],
        extra_bytes=row["extra_bytes"],
        text=row["text"],
        description=row["description"],
        invocation_tokens=tuple(map(int, row["invocation_tokens"].split())),
        metadata=row["metadata"],
    )


def _quotient(number: float, weight: float) -> float:
    return number / weight if weight > 0 else math.inf
