"""Work on names: what was asked for, how far it is, why it failed.

In: requests to load, and the states that loads and unloads reach. Out: `RegistryJob`s that survive every process, so
that one that was cut short is found again. A load belongs to the store that works on it, and only that one writes about
it; loads of a name take effect in the order of their numbers, whoever works on them. A name keeps its last
`MAX_JOBS_PER_NAME`. Doing the work is left to `loading.py`; an unload's job is written down by `catalog.py`, together
with what it does to the name and to loads of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from sqlalchemy import Connection, delete, insert, select, update

from app.deployments.registry.db.database import Database, storable_text
from app.deployments.registry.db.tables import jobs, name_condition
from app.deployments.registry.event_log import NewEvent, record_audit, record_events
from app.deployments.registry.models import FINAL_STATES, LoadRequest, RegistryJob, State
from app.engine.adapters.combining.combination import shown_source
from app.engine.errors import AdapterUnloaded, NotReady

MAX_JOBS_PER_NAME = 20

#: States a job leaves.
_UNFINISHED = tuple(state for state in State if state not in FINAL_STATES)
#: How the journal calls a state that was reached.
_EVENTS = {
    State.DOWNLOADING: "downloading",
    State.VALIDATING: "validating",
    State.ON_DISK: "downloaded to disk",
    State.ON_HOST: "loaded to host",
    State.LOADED: "routable",
    State.FAILED: "failed",
}


class EarlierLoadsPending(NotReady):
    """Loads of the name that were asked for before have not ended: this one takes effect after them."""


class Jobs:
    """Every call is one transaction. `owner` is the store that works on the loads that are created here."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._base = database.base_digest
        self._owner = owner

    def create(self, request: LoadRequest) -> RegistryJob:
        """Write down that a load was asked for."""
        now_s = self._database.clock()
        tenant_id, name, source, who = request.tenant_id, request.name, request.source, request.who
        shown = shown_source(source)
        with self._database.write() as connection:
            job = RegistryJob(
                uuid.uuid4().hex, name, "load", source, State.REQUESTED, who, now_s, now_s, request.pinned,
                request.traffic_weight, tenant_id=tenant_id, owner=self._owner,
                number=self._database.next_revision(connection), description=request.description,
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
        """Write down that a job has reached a state, and when it passed others. What is None stays as it was.

        Raises NotReady if another store works on it by now.
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
            news = [
                NewEvent(_EVENTS[step], job.name, job.tenant_id, after.generation, after.digest, detail, time_s=time_s)
                for step, time_s, detail in steps
                if step in _EVENTS
            ]
            record_events(connection, self._database, news)
        return after

    def get(self, job_id: str, *, tenant_id: str) -> RegistryJob | None:
        query = select(jobs).where(jobs.c.id == job_id, jobs.c.base_digest == self._base, jobs.c.tenant_id == tenant_id)
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else _job(row)

    def latest(self, name: str, *, tenant_id: str) -> RegistryJob | None:
        """The last thing that was asked of a name."""
        query = select(jobs).where(*name_condition(jobs, self._base, tenant_id, name))
        with self._database.read() as connection:
            row = connection.execute(query.order_by(jobs.c.number.desc()).limit(1)).mappings().first()
        return None if row is None else _job(row)

    def unfinished_jobs(self, kind: Literal["load", "unload"]) -> list[RegistryJob]:
        """Jobs of a kind that have not ended, oldest first."""
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
    """The ids of the loads of a name that have not ended: now they have. Part of the caller's transaction."""
    mine = (
        *name_condition(jobs, database.base_digest, tenant_id, name),
        jobs.c.kind == "load",
        jobs.c.state.in_(_UNFINISHED),
    )
    ids = list(connection.scalars(select(jobs.c.id).where(*mine)))
    values = {"state": State.FAILED, "reason": str(unloaded_error(name)), "updated_s": database.clock()}
    connection.execute(update(jobs).where(*mine).values(values))
    return ids


def adopt_loads(connection: Connection, database: Database, owner: str, living: Collection[str]) -> list[RegistryJob]:
    """Loads whose store is not among the living, oldest first: `owner` works on them now. Part of the caller's
    transaction."""
    left = (
        jobs.c.base_digest == database.base_digest,
        jobs.c.state.in_(_UNFINISHED),
        jobs.c.kind == "load",
        jobs.c.owner.not_in(living),
    )
    rows = connection.execute(update(jobs).where(*left).values(owner=owner).returning(*jobs.c)).mappings()
    return sorted(map(_job, rows), key=lambda job: job.number)


def check_turn(connection: Connection, base_digest: str, job: RegistryJob) -> None:
    """Raises AdapterUnloaded for a load that was cancelled, NotReady for one that another store works on by now, and
    EarlierLoadsPending if it is not this one's turn. Part of the caller's transaction."""
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
    """What a load ends with that was cancelled."""
    return AdapterUnloaded(f"adapter {name!r} was unloaded while it was being loaded; load it again if it is wanted")


def taken_over_error(job: RegistryJob) -> NotReady:
    """What a load ends with whose store was taken for dead."""
    return NotReady(f"another process has taken over the load of {job.name!r}; ask for job {job.id}", retry_after_s=2)


def update_job(connection: Connection, job: RegistryJob) -> bool:
    """False: another store works on it. Part of the caller's transaction."""
    fields = ("state", "reason", "generation", "digest", "updated_s")
    mine = update(jobs).where(jobs.c.id == job.id, jobs.c.owner == job.owner)
    return bool(connection.execute(mine.values({field: getattr(job, field) for field in fields})).rowcount)


def _job(row: Mapping[Any, Any]) -> RegistryJob:
    return RegistryJob(
        row["id"],
        row["name"],
        row["kind"],
        row["source"],
        State(row["state"]),
        row["requested_by"],
        row["created_s"],
        row["updated_s"],
        row["pinned"],
        row["traffic_weight"],
        row["reason"],
        row["generation"],
        row["digest"],
        tenant_id=row["tenant_id"],
        owner=row["owner"],
        number=row["number"],
        description=row["description"],
    )
