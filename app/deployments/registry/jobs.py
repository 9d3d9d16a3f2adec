"""Work on names: what was asked for, how far it is, why it failed.

In: requests to load or unload, and the states they reach. Out: `Job`s that survive every process, so that
one that was cut short is found again. A name keeps its last `MAX_JOBS_PER_NAME`. Doing the work is left
to `lifecycle.py`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from sqlalchemy import delete, insert, select, update

from app.deployments.registry.database import Database, storable
from app.deployments.registry.entries import DEFAULT_TENANT, FINAL_STATES, Job, State
from app.deployments.registry.journal import NewEvent, record_audit, record_events
from app.deployments.registry.tables import jobs, named

MAX_JOBS_PER_NAME = 20

#: How the journal calls a state that was reached.
_EVENTS = {
    State.DOWNLOADING: "downloading",
    State.VALIDATING: "validating",
    State.ON_DISK: "downloaded to disk",
    State.ON_HOST: "loaded to host",
    State.LOADED: "routable",
    State.FAILED: "failed",
}


class Jobs:
    """Every call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._base = database.base_digest

    def create(
        self,
        name: str,
        kind: Literal["load", "unload"],
        source: str = "",
        *,
        pinned: bool | None = None,
        traffic_weight: float | None = None,
        tenant_id: str = DEFAULT_TENANT,
        who: str = DEFAULT_TENANT,
    ) -> Job:
        """Write down what was asked for."""
        now_s = time.time()
        state = State.REQUESTED if kind == "load" else State.DRAINING
        job = Job(
            uuid.uuid4().hex, name, kind, source, state, who, now_s, now_s, pinned, traffic_weight, tenant_id=tenant_id
        )
        key = named(jobs, self._base, tenant_id, name)
        with self._database.write() as connection:
            connection.execute(
                insert(jobs).values(
                    id=job.id,
                    base_digest=self._base,
                    tenant_id=tenant_id,
                    name=name,
                    kind=kind,
                    source=source,
                    pinned=pinned,
                    traffic_weight=traffic_weight,
                    state=state,
                    requested_by=who,
                    created_s=now_s,
                    updated_s=now_s,
                )
            )
            newest = select(jobs.c.id).where(*key).order_by(jobs.c.created_s.desc()).limit(MAX_JOBS_PER_NAME)
            connection.execute(
                delete(jobs).where(*key, jobs.c.state.in_(FINAL_STATES), jobs.c.id.not_in(newest.scalar_subquery()))
            )
            record_audit(connection, self._base, who, f"request {kind}", name, tenant_id, {"source": source})
            if kind == "load":
                record_events(connection, self._base, [NewEvent("requested", name, tenant_id, detail=source)])
        return job

    def advance(
        self,
        job: Job,
        state: State,
        *,
        reason: str | None = None,
        generation: int | None = None,
        digest: str | None = None,
        passed: Sequence[tuple[State, float]] = (),
    ) -> Job:
        """Write down that a job has reached a state, and when it passed others. What is None stays as it was."""
        after = replace(
            job,
            state=state,
            reason=reason and storable(reason),
            generation=job.generation if generation is None else generation,
            digest=job.digest if digest is None else digest,
            updated_s=time.time(),
        )
        with self._database.write() as connection:
            connection.execute(
                update(jobs)
                .where(jobs.c.id == job.id)
                .values(
                    state=after.state,
                    reason=after.reason,
                    generation=after.generation,
                    digest=after.digest,
                    updated_s=after.updated_s,
                )
            )
            steps = [(*step, None) for step in passed] + [(state, after.updated_s, reason)]
            news = [
                NewEvent(_EVENTS[step], job.name, job.tenant_id, after.generation, after.digest, detail, time_s=time_s)
                for step, time_s, detail in steps
                if step in _EVENTS
            ]
            record_events(connection, self._base, news)
        return after

    def get(self, job_id: str, *, tenant_id: str = DEFAULT_TENANT) -> Job | None:
        query = select(jobs).where(jobs.c.id == job_id, jobs.c.base_digest == self._base, jobs.c.tenant_id == tenant_id)
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else _job(row)

    def latest(self, name: str, *, tenant_id: str = DEFAULT_TENANT) -> Job | None:
        """The last thing that was asked of a name."""
        query = select(jobs).where(*named(jobs, self._base, tenant_id, name))
        with self._database.read() as connection:
            row = connection.execute(query.order_by(jobs.c.created_s.desc()).limit(1)).mappings().first()
        return None if row is None else _job(row)

    def unfinished(self) -> list[Job]:
        """Jobs of a life that ended before they did, oldest first."""
        query = select(jobs).where(jobs.c.base_digest == self._base, jobs.c.state.not_in(FINAL_STATES))
        with self._database.read() as connection:
            return [_job(row) for row in connection.execute(query.order_by(jobs.c.created_s)).mappings()]


def _job(row: Mapping[Any, Any]) -> Job:
    return Job(
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
        row["tenant_id"],
    )
