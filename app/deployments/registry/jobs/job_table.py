"""Jobs in the database: what was requested for a name, how far it is, why it failed.

Jobs survive every process, so one that was interrupted is found again. A load belongs to one store, and only that store
writes its state; loads of a name take effect in the order of their numbers, whichever store works on them. A name keeps
its last `MAX_JOBS_PER_NAME` jobs. `load_jobs` does the work; the catalog inserts an unload's job together with its
effect on the name.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Literal

from sqlalchemy import Connection, delete, insert, select, update

from app.deployments.registry.db.database import Database, storable_text
from app.deployments.registry.db.tables import jobs, name_condition
from app.deployments.registry.event_log import NewEvent, record_audit, record_events
from app.deployments.registry.models import FINAL_STATES, LoadRequest, RegistryJob, State
from app.engine.adapters.combining.combination import display_source
from app.engine.errors import AdapterUnloaded, NotReady

MAX_JOBS_PER_NAME = 20

#: States that are not final.
_UNFINISHED = tuple(state for state in State if state not in FINAL_STATES)
#: The event of each state that is reached.
_EVENTS = {
    State.DOWNLOADING: "downloading",
    State.VALIDATING: "validating",
    State.ON_DISK: "downloaded to disk",
    State.ON_HOST: "loaded to host",
    State.LOADED: "routable",
    State.FAILED: "failed",
}


class EarlierLoadsPending(NotReady):
    """Earlier loads of the name have not ended; this one takes effect after them."""


class Jobs:
    """Every call is one transaction. `owner` is the id of the store that works on the loads created here."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._base = database.base_digest
        self._owner = owner

    def create(self, request: LoadRequest) -> RegistryJob:
        """Insert the job of a new load."""
        now_s = self._database.clock()
        tenant_id, name, source, who = request.tenant_id, request.name, request.source, request.who
        shown = display_source(source)
        with self._database.write() as connection:
            job = RegistryJob(
                uuid.uuid4().hex, name, "load", source, State.REQUESTED, who, now_s, now_s, request.pinned,
                request.traffic_weight, tenant_id=tenant_id, owner=self._owner,
                number=self._database.next_revision(connection), description=request.description,
                defaults=request.defaults,
            )  # fmt: skip
            insert_job(connection, self._database, job)
            record_audit(connection, self._database, who, "request load", name, tenant_id, {"source": shown})
            record_events(connection, self._database, [NewEvent("requested", name, tenant_id, detail=shown)])
        return job

    def advance(
        self,
        job: RegistryJob,
        state: State,
        *,
        reason: str | None = None,
        generation: int | None = None,
        digest: str | None = None,
        passed: Sequence[tuple[State, float]] = (),
    ) -> RegistryJob:
        """Store a job's new state, and the states it `passed` with their times. None keeps a value.

        Raises NotReady if another store now works on the job.
        """
        after = replace(
            job,
            state=state,
            reason=reason and storable_text(reason),
            generation=job.generation if generation is None else generation,
            digest=job.digest if digest is None else digest,
            updated_s=self._database.clock(),
        )
        with self._database.write() as connection:
            if not update_job(connection, after):
                raise taken_over_error(job)
            steps = [(*step, None) for step in passed] + [(state, after.updated_s, reason)]
            new_events = [
                NewEvent(_EVENTS[step], job.name, job.tenant_id, after.generation, after.digest, detail, time_s=time_s)
                for step, time_s, detail in steps
                if step in _EVENTS
            ]
            record_events(connection, self._database, new_events)
        return after

    def get(self, job_id: str, *, tenant_id: str) -> RegistryJob | None:
        query = select(jobs).where(jobs.c.id == job_id, jobs.c.base_digest == self._base, jobs.c.tenant_id == tenant_id)
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else _job(row)

    def latest(self, name: str, *, tenant_id: str) -> RegistryJob | None:
        """The last job that was requested for a name."""
        query = select(jobs).where(*name_condition(jobs, self._base, tenant_id, name))
        with self._database.read() as connection:
            row = connection.execute(query.order_by(jobs.c.number.desc()).limit(1)).mappings().first()
        return None if row is None else _job(row)

    def unfinished_jobs(self, kind: Literal["load", "unload"]) -> list[RegistryJob]:
        """Unfinished jobs of a kind, oldest first."""
        states = (State.DRAINING,) if kind == "unload" else _UNFINISHED
        query = select(jobs).where(jobs.c.base_digest == self._base, jobs.c.state.in_(states), jobs.c.kind == kind)
        with self._database.read() as connection:
            return [_job(row) for row in connection.execute(query.order_by(jobs.c.number)).mappings()]


def insert_job(connection: Connection, database: Database, job: RegistryJob) -> None:
    """Part of the caller's transaction."""
    connection.execute(insert(jobs).values(base_digest=database.base_digest, **asdict(job)))
    key = name_condition(jobs, database.base_digest, job.tenant_id, job.name)
    newest = select(jobs.c.id).where(*key).order_by(jobs.c.number.desc()).limit(MAX_JOBS_PER_NAME)
    connection.execute(
        delete(jobs).where(*key, jobs.c.state.in_(FINAL_STATES), jobs.c.id.not_in(newest.scalar_subquery()))
    )


def cancel_loads(connection: Connection, database: Database, tenant_id: str, name: str) -> list[str]:
    """Fail the unfinished loads of a name; returns their ids. Part of the caller's transaction."""
    mine = (
        *name_condition(jobs, database.base_digest, tenant_id, name),
        jobs.c.kind == "load",
        jobs.c.state.in_(_UNFINISHED),
    )
    ids = list(connection.scalars(select(jobs.c.id).where(*mine)))
    values = {"state": State.FAILED, "reason": str(unloaded_error(name)), "updated_s": database.clock()}
    connection.execute(update(jobs).where(*mine).values(values))
    return ids


def forget_failed_loads(connection: Connection, database: Database, tenant_id: str, name: str) -> bool:
    """Remove a name's failed loads if the last that was requested for it is one; returns whether it is. Part of the
    caller's transaction.
    """
    key = name_condition(jobs, database.base_digest, tenant_id, name)
    newest = select(jobs.c.kind, jobs.c.state).where(*key).order_by(jobs.c.number.desc()).limit(1)
    last = connection.execute(newest).first()
    if last is None or last.kind != "load" or last.state != State.FAILED:
        return False
    connection.execute(delete(jobs).where(*key, jobs.c.kind == "load", jobs.c.state == State.FAILED))
    return True


def adopt_loads(connection: Connection, database: Database, owner: str, living: Collection[str]) -> list[RegistryJob]:
    """Make `owner` the worker of loads whose store is dead; returns them, oldest first. Part of the caller's
    transaction.
    """
    orphaned = (
        jobs.c.base_digest == database.base_digest,
        jobs.c.state.in_(_UNFINISHED),
        jobs.c.kind == "load",
        jobs.c.owner.not_in(living),
    )
    rows = connection.execute(update(jobs).where(*orphaned).values(owner=owner).returning(*jobs.c)).mappings()
    return sorted(map(_job, rows), key=lambda job: job.number)


def check_turn(connection: Connection, base_digest: str, job: RegistryJob) -> None:
    """Raises AdapterUnloaded for a cancelled load, NotReady if another store works on it, EarlierLoadsPending if it is
    not this load's turn. Part of the caller's transaction.
    """
    row = connection.execute(select(jobs.c.state, jobs.c.owner).where(jobs.c.id == job.id)).first()
    if row is None or row.state == State.FAILED:
        raise unloaded_error(job.name)
    if row.owner != job.owner:
        raise taken_over_error(job)
    ahead = (jobs.c.kind == "load", jobs.c.state.in_(_UNFINISHED), jobs.c.number < job.number)
    query = select(jobs.c.id).where(*name_condition(jobs, base_digest, job.tenant_id, job.name), *ahead)
    if connection.scalar(query.limit(1)) is not None:
        raise EarlierLoadsPending(
            f"adapter {job.name!r} is being loaded by another request that came before", retry_after_s=1
        )


def unloaded_error(name: str) -> AdapterUnloaded:
    """The error of a load that an unload has cancelled."""
    return AdapterUnloaded(f"adapter {name!r} was unloaded while it was being loaded; load it again if you need it")


def taken_over_error(job: RegistryJob) -> NotReady:
    """The error of a load that another store has adopted."""
    return NotReady(f"another process has taken over the load of {job.name!r}; ask for job {job.id}", retry_after_s=2)


def update_job(connection: Connection, job: RegistryJob) -> bool:
    """Returns False if another store works on it. Part of the caller's transaction."""
    fields = ("state", "reason", "generation", "digest", "updated_s")
    mine = update(jobs).where(jobs.c.id == job.id, jobs.c.owner == job.owner)
    return bool(connection.execute(mine.values({field: getattr(job, field) for field in fields})).rowcount)


def _job(row: Mapping[Any, Any]) -> RegistryJob:
    values = {field.name: row[field.name] for field in fields(RegistryJob)}
    return RegistryJob(**values | {"state": State(row["state"])})
