"""The catalog: which name means which adapter contents.

A name's generation rises whenever its contents change and never falls, not even over a removal, so nothing that was
made for an older meaning of a name can be taken for the present one. Equal contents have the same digest under any
name. Adapters and aliases share one namespace. Reading adapters is left to the store.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, RowMapping, Table, and_, insert, select, update

from app.deployments.registry.aliases import aliases_to, is_alias
from app.deployments.registry.db.adapter_queries import (
    card_values,
    entry_of,
    merged_settings,
    names_of_digests,
    next_generation,
    ref_of,
)
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import adapters, generations, name_condition, uses
from app.deployments.registry.event_log import NewEvent, record_audit, record_events
from app.deployments.registry.jobs.job_table import (
    cancel_loads,
    check_turn,
    forget_failed_loads,
    insert_job,
    update_job,
)
from app.deployments.registry.last_used import forget_use, hottest_entries, note_uses, recently_used
from app.deployments.registry.models import (
    LIVE_STATES,
    CatalogEntry,
    Generation,
    LoadRequest,
    RegistryJob,
    State,
    cannot_pin_error,
)
from app.deployments.registry.pins import PinLimits
from app.deployments.registry.tier_events import Move
from app.engine.adapters.card import AdapterCard
from app.engine.adapters.combining.combination import common_text, display_source, parse_combination
from app.engine.errors import AdapterBusy, InvalidRequest, ModelNotFound
from app.model_names import split_version
from app.redaction import without_keys

_SAME_CONTENTS = and_(uses.c.base_digest == adapters.c.base_digest, uses.c.digest == adapters.c.digest)


class UnloadStarted(NamedTuple):
    """The first step of an unload; if the job has no digest, it is also the last.

    `entry` None: the name had no entry yet. `cancelled`: ids of cancelled load jobs of the name.
    """

    entry: CatalogEntry | None
    job: RegistryJob
    cancelled: Sequence[str]


class Catalog:
    """Every call is one transaction; threads and processes may call concurrently. `pin_limits` may be replaced."""

    def __init__(
        self,
        database: Database,
        pin_limits: PinLimits = PinLimits(),  # noqa: B008  (frozen)
        check_quota: Callable[[Connection, str], None] = lambda *_: None,
    ) -> None:
        """`check_quota` is called with the tenant id at the end of a registering transaction; raising undoes it."""
        self._database = database
        self._base = database.base_digest
        self.pin_limits = pin_limits
        self.check_quota = check_quota

    def register(
        self, request: LoadRequest, uri: str, card: AdapterCard, job: RegistryJob | None = None
    ) -> CatalogEntry:
        """Make `request.name` mean the contents that `card` describes, found at `uri` (the canonical form of the
        source).

        The generation rises if the contents differ from the name's last ones. Raises InvalidRequest if an alias has the
        name, AdapterTooLarge if no engine could hold the adapter or its pin does not fit, AdapterUnloaded if the load
        `job` was cancelled, EarlierLoadsPending if another load comes first, NotReady if another process now works on
        `job`.
        """
        name, tenant_id, who = request.name, request.tenant_id, request.who
        self.pin_limits.alone.check(name, card.max_rank, card.extra_bytes)
        with self._database.write() as connection:
            if job is not None:
                check_turn(connection, self._base, job)
            if is_alias(connection, self._base, tenant_id, name):
                raise InvalidRequest(f"{name!r} is an alias; remove the alias or choose another name", param="name")
            old = (
                connection.execute(select(adapters).where(*self._name_condition(adapters, tenant_id, name)))
                .mappings()
                .first()
            )
            values = {
                "state": State.LOADED,
                "generation": next_generation(old, card.digest),
                "uri": uri,
                "source": request.source,
                "registered_s": self._database.clock(),
                "revision": self._database.next_revision(connection),
                **card_values(card),
                **merged_settings(old, request, card),
            }
            entry = self._write(connection, tenant_id, name, values, is_new=old is None)
            if old is None or entry.ref.generation != old["generation"]:
                _note_generation(connection, self._base, entry, who)
            self._record_load(connection, entry, who)
            self._check_pins(connection, name, entry.pinned)
            self.check_quota(connection, tenant_id)
            if old is not None and old["digest"] != card.digest:
                forget_use(connection, self._base, old["digest"])
        return entry

    def begin_unload(self, name: str, *, tenant_id: str, who: str) -> UnloadStarted:
        """Take a name out of service and cancel its unfinished loads; its generation is remembered. A name with a
        version is taken out only while it means that version. A name that is not registered because its last load
        failed is forgotten.

        The job is unfinished until `finish_unload`, unless there were only loads to cancel. Raises NotFound, and
        AdapterBusy while an alias points to the adapter.
        """
        key = self._name_condition(adapters, tenant_id, name)
        asked, (name, version) = name, split_version(name)
        now_s = self._database.clock()
        with self._database.write() as connection:
            cancelled = cancel_loads(connection, self._database, tenant_id, name)
            query = select(adapters).where(*key, adapters.c.state.in_(LIVE_STATES))
            row = connection.execute(query).mappings().first()
            is_unknown = row is None and version is None and not cancelled
            is_forgotten = is_unknown and forget_failed_loads(connection, self._database, tenant_id, name)
            if row is None and (version is not None or not (cancelled or is_forgotten)):
                raise not_registered_error(asked)
            users = aliases_to(connection, self._base, tenant_id, name)
            if row is not None and users:
                raise AdapterBusy(
                    f"alias {users[0]!r} sends requests to adapter {name!r}; promote or remove the alias first"
                )
            revision = self._database.next_revision(connection)
            if row is None or row["state"] == State.REGISTERED:  # no replica holds it
                if row is not None:
                    connection.execute(update(adapters).where(*key).values(state=State.REMOVED, revision=revision))
                job = RegistryJob(
                    uuid.uuid4().hex, name, "unload", "", State.REMOVED, who, now_s, now_s,
                    tenant_id=tenant_id, number=revision,
                )  # fmt: skip
                if not is_forgotten:
                    insert_job(connection, self._database, job)
                record_audit(connection, self._database, who, "unload", name, tenant_id, {"cancelled": cancelled})
                record_events(connection, self._database, [NewEvent("removed", name, tenant_id)])
                return UnloadStarted(None if row is None else entry_of(row), job, cancelled)
            connection.execute(update(adapters).where(*key).values(state=State.DRAINING, revision=revision))
            generation, digest = row["generation"], row["digest"]
            job = RegistryJob(
                uuid.uuid4().hex, name, "unload", row["uri"], State.DRAINING, who, now_s, now_s,
                generation=generation, digest=digest, tenant_id=tenant_id, number=revision,
            )  # fmt: skip
            insert_job(connection, self._database, job)
            record_audit(connection, self._database, who, "unload", name, tenant_id, {"generation": generation})
            record_events(connection, self._database, [NewEvent("draining", name, tenant_id, generation, digest)])
        return UnloadStarted(entry_of(row), job, cancelled)

    def finish_unload(self, job: RegistryJob) -> RegistryJob:
        """End an unload job and remove the name, unless it has been registered again since."""
        after = replace(job, state=State.REMOVED, updated_s=self._database.clock())
        key = self._name_condition(adapters, job.tenant_id, job.name)
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
        defaults: str | None = None,
        tenant_id: str,
        who: str,
    ) -> CatalogEntry:
        """Change the settings of a name; None keeps a value.

        Raises NotFound, AdapterTooLarge for a pin that does not fit beside the others, InvalidRequest for a pin of an
        adapter that is not loaded.
        """
        given = {
            "pinned": pinned,
            "traffic_weight": traffic_weight,
            "description": description,
            "defaults": defaults,
        }
        changes = {field: value for field, value in given.items() if value is not None}
        key = self._name_condition(adapters, tenant_id, name)
        with self._database.write() as connection:
            old = self._living(connection, tenant_id, name)
            name = old["name"]
            if pinned and old["state"] == State.REGISTERED:
                raise cannot_pin_error(name)
            if changes:
                revision = self._database.next_revision(connection)
                connection.execute(update(adapters).where(*key).values(**changes, revision=revision))
                self._check_pins(connection, name, bool(pinned))
                record_audit(connection, self._database, who, "configure", name, tenant_id, changes)
            if pinned is not None and pinned != old["pinned"]:
                event = "pinned" if pinned else "unpinned"
                new_event = NewEvent(event, name, tenant_id, old["generation"], old["digest"])
                record_events(connection, self._database, [new_event])
            return entry_of(connection.execute(select(adapters).where(*key)).mappings().one())

    def get(self, name: str, *, tenant_id: str) -> CatalogEntry | None:
        """The entry of a name, with the time of its last use; also of a name that is registered but not loaded."""
        query = (
            select(adapters, uses.c.last_used_s)
            .outerjoin(uses, _SAME_CONTENTS)
            .where(*self._name_condition(adapters, tenant_id, name), adapters.c.state.in_(LIVE_STATES))
        )
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else entry_of(row)

    def common_text(self, source: str) -> str:
        """The text settings of a combination's parts, as they are registered.

        Raises CombinationError if they differ, NotFound if a part's name means other contents now.
        """
        parts = [part.ref for part in parse_combination(source).parts]
        entries = [self.get(part.name, tenant_id=part.tenant_id) for part in parts]
        for part, entry in zip(parts, entries, strict=True):
            if entry is None or entry.ref.digest != part.digest:
                raise ModelNotFound(
                    f"adapter {part.name!r} was unloaded or replaced meanwhile; combine what is registered"
                )
        return common_text([part.name for part in parts], [entry.text for entry in entries if entry is not None])

    def entries(self) -> list[CatalogEntry]:
        """All loaded names in order."""
        return self._select()

    def pinned_entries(self) -> list[CatalogEntry]:
        return self._select(adapters.c.pinned)

    def is_used(self, digest: str) -> bool:
        """Whether any name means these contents."""
        query = select(adapters.c.name).where(
            adapters.c.base_digest == self._base, adapters.c.digest == digest, adapters.c.state == State.LOADED
        )
        with self._database.read() as connection:
            return connection.scalar(query.limit(1)) is not None

    def generations(self, name: str, *, tenant_id: str) -> list[Generation]:
        """All generations of a name, newest first."""
        query = select(generations).where(*self._name_condition(generations, tenant_id, name))
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(generations.c.generation.desc())).mappings().all()
        return [
            Generation(ref_of(row), row["max_rank"], row["size_bytes"], row["registered_s"], row["registered_by"])
            for row in rows
        ]

    def note_use(self, last_used_s: Mapping[str, float]) -> None:
        """Record when requests last used which digests (Unix time); older times than the known ones are ignored."""
        with self._database.write() as connection:
            note_uses(connection, self._base, last_used_s)

    def note_residency(self, replica_id: str, loaded: Sequence[str], unloaded: Sequence[str]) -> None:
        """Record an event for each name of the digests that were loaded to or unloaded from a replica's device."""
        now_s = self._database.clock()
        moves = [Move("loaded to device", digest, now_s) for digest in loaded]
        moves += [Move("unloaded from device", digest, now_s) for digest in unloaded]
        self.note_moves(moves, replica_id)

    def note_moves(self, moves: Sequence[Move], replica_id: str | None = None) -> None:
        """Record an event for each name whose contents moved, and for the last unloaded names when their
        contents leave.
        """
        if not moves:
            return
        with self._database.write() as connection:
            leaving = {move.digest for move in moves if move.leaves}
            rows = defaultdict[str, list[RowMapping]](list)
            for row in names_of_digests(connection, self._base, {move.digest for move in moves}, leaving):
                rows[row["digest"]].append(row)
            new_events = [
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
                for row in rows[move.digest]
                if row["is_live"] or move.leaves
            ]
            record_events(connection, self._database, new_events)

    def hot(self, limit: int) -> list[CatalogEntry]:
        """Registered adapters, most recently used first; each digest once."""
        with self._database.read() as connection:
            rows = recently_used(connection, self._base)
        return hottest_entries(rows, limit)

    def _write(
        self, connection: Connection, tenant_id: str, name: str, values: Mapping[str, Any], *, is_new: bool
    ) -> CatalogEntry:
        key = self._name_condition(adapters, tenant_id, name)
        if is_new:
            place = {"base_digest": self._base, "tenant_id": tenant_id, "name": name}
            connection.execute(insert(adapters).values(**place, **values))
        else:
            connection.execute(update(adapters).where(*key).values(**values))
        return entry_of(connection.execute(select(adapters).where(*key)).mappings().one())

    def _record_load(self, connection: Connection, entry: CatalogEntry, who: str) -> None:
        ref, shown = entry.ref, display_source(entry.ref.uri)
        detail = {"uri": shown, "generation": ref.generation}
        record_audit(connection, self._database, who, "load", ref.name, ref.tenant_id, detail)
        event = NewEvent("registered", ref.name, ref.tenant_id, ref.generation, ref.digest, detail=shown)
        record_events(connection, self._database, [event])

    def _check_pins(self, connection: Connection, name: str, pinned: bool) -> None:
        """Check the limits after a change, before it is committed."""
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
        named_so = (*self._name_condition(adapters, tenant_id, name), adapters.c.state.in_(LIVE_STATES))
        row = connection.execute(select(adapters).where(*named_so)).mappings().first()
        if row is None:
            raise not_registered_error(name)
        return row

    def _name_condition(self, table: Table, tenant_id: str, name: str) -> Sequence[ColumnElement[bool]]:
        return name_condition(table, self._base, tenant_id, name)


def _note_generation(connection: Connection, base_digest: str, entry: CatalogEntry, who: str) -> None:
    ref = entry.ref
    values = {
        "base_digest": base_digest,
        "tenant_id": ref.tenant_id,
        "name": ref.name,
        "generation": ref.generation,
        "digest": ref.digest,
        "uri": ref.uri,
        "max_rank": entry.max_rank,
        "size_bytes": entry.size_bytes,
        "registered_s": entry.registered_s,
        "registered_by": who,
    }
    connection.execute(insert(generations).values(**values))


def not_registered_error(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"no adapter is registered as {without_keys(name)[:80]!r}; GET /v1/loras lists the registered ones"
    )
