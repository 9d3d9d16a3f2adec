"""Lazy registration: names that are registered without reading their adapters, which load on first use or on demand.

Registering looks at no source, so a wrong source shows at the first request. Each name is loaded once however many
requests wait, and a name that failed is not tried again for a while. `load_jobs` does the loads; which requests wait is
the ingress's decision.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from app.deployments.registry.catalog import not_registered_error
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import adapters, aliases, audit, events
from app.deployments.registry.feed.view import Key
from app.deployments.registry.jobs.failure_backoff import FailureBackoff, failure_key, unreadable_error
from app.deployments.registry.last_used import forget_use
from app.deployments.registry.models import (
    LIVE_STATES,
    MAX_REGISTRATIONS,
    CatalogEntry,
    LoadRequest,
    Registration,
    RegistrationCounts,
    RegistryJob,
    State,
    check_description,
    check_source,
)
from app.deployments.registry.registry import Registry
from app.deployments.registry.service import RegistryService
from app.deployments.rpc.background_tasks import SingleFlight, Tasks
from app.engine.adapters.combining.combination import display_source
from app.engine.errors import CombinationError, InvalidRequest, PolyloraError, ServerOverloaded
from app.engine.scheduling.fair_limiter import FairSemaphore
from app.logging import LogEvent

logger = logging.getLogger(__name__)


class LazyRegistrations:
    """One event loop; the database is called in threads. `failures`: names that could not be loaded a moment ago."""

    def __init__(self, registry: Registry, registry_service: RegistryService, failures: FailureBackoff) -> None:
        self._registry = registry
        self._registry_service = registry_service
        self._failures = failures
        self._tasks = Tasks()
        self._pending: SingleFlight[Key, tuple[RegistryJob, CatalogEntry]] = SingleFlight(self._tasks)
        self._turns = FairSemaphore("registering names", 1)
        self._next_write_s = 0.0  # by the monotonic clock

    async def register(self, registrations: Sequence[Registration], *, tenant_id: str, who: str) -> RegistrationCounts:
        """Register all names or none; every ingress has them when this returns.

        A name that is loaded from the same source stays loaded. Raises InvalidRequest for a name that is invalid, an
        alias, repeated or loaded from another source, UnsafeSource, AdapterQuotaError, QueueFull.
        """
        check_registrations(registrations)
        for item in registrations:
            self._registry_service.check_name(item.name)
            check_source(item.source)
            check_description(item.description)
        database, check_quota = self._registry.database, self._registry.catalog.check_quota
        counts: list[RegistrationCounts] = []

        def write() -> RegistrationCounts | None:
            with database.write() as connection:
                counts.append(_write(connection, database, registrations, tenant_id, who))
                check_quota(connection, tenant_id)
            return counts[-1] if counts[-1].num_changed else None

        # Thousands of names hold the database's one write lock for a second: then others have it for as long.
        async with self._turns.hold(tenant_id):
            await asyncio.sleep(self._next_write_s - time.monotonic())
            began_s = time.monotonic()
            try:
                await self._registry_service.change_feed.change(write)
            finally:
                self._next_write_s = 2 * time.monotonic() - began_s
        for item in registrations:
            self._failures.clear(failure_key((tenant_id, item.name)))
        logger.info(LogEvent("adapters registered lazily", number=counts[-1].num_changed, tenant=tenant_id, by=who))
        return counts[-1]

    async def load_registered(self, name: str, *, tenant_id: str, who: str) -> tuple[RegistryJob | None, CatalogEntry]:
        """Load a registered name so that every ingress serves it; no job if it is loaded already. Raises NotFound, and
        what loading raises.
        """
        entry = await asyncio.to_thread(self._registry.catalog.get, name, tenant_id=tenant_id)
        if entry is None:
            raise not_registered_error(name)
        if entry.is_read:
            await self._registry_service.change_feed.settle()  # it may have been written a moment ago
            return None, entry
        key = (tenant_id, entry.ref.name)
        return await asyncio.shield(self._pending.task(key, lambda: self._load(entry, who)))

    async def load_for_request(self, name: str, *, tenant_id: str, who: str) -> None:
        """`load_registered`, with an error for clients that names no place of this server; the job and the log have the
        cause.

        Raises AdapterUnreadable, also for a while after a failure; NotReady while the database is away.
        """
        try:
            if (tenant_id, name) not in self._pending:
                self._failures.check(failure_key((tenant_id, name)), f"adapter {name!r}")
            await self.load_registered(name, tenant_id=tenant_id, who=f"first use by {who}")
        except (ServerOverloaded, CombinationError):
            raise
        except PolyloraError as error:
            raise unreadable_error(name, error) from None

    def close(self) -> None:
        """Start no more loads; running ones belong to `LoadJobs`."""
        self._tasks.cancel()

    async def _load(self, entry: CatalogEntry, who: str) -> tuple[RegistryJob, CatalogEntry]:
        request = LoadRequest(entry.tenant_id, entry.name, entry.source, who, description=entry.description or None)
        with self._failures.recorded_outcome(failure_key((entry.tenant_id, entry.name))):
            return await self._registry_service.load_and_wait(request)


def check_registrations(registrations: Sequence[Registration]) -> None:
    """Raises InvalidRequest for no registration, too many, or a repeated name."""
    if not 1 <= len(registrations) <= MAX_REGISTRATIONS:
        raise InvalidRequest(
            f"{len(registrations)} adapters in one call; a call takes 1 to {MAX_REGISTRATIONS}: send several calls",
            param="adapters",
        )
    name, times = Counter(item.name for item in registrations).most_common(1)[0]
    if times > 1:
        raise InvalidRequest(f"the name {name[:80]!r} is given {times} times; give each name once", param="adapters")


def _write(
    connection: Connection, database: Database, registrations: Sequence[Registration], tenant_id: str, who: str
) -> RegistrationCounts:
    """Part of the caller's transaction. Raises InvalidRequest."""
    place = {"base_digest": database.base_digest, "tenant_id": tenant_id}
    names = [item.name for item in registrations]
    _check_no_alias(connection, place, names)
    mine = (adapters.c.base_digest == database.base_digest, adapters.c.tenant_id == tenant_id)
    query = select(adapters).where(*mine, adapters.c.name.in_(names))
    present = {row["name"]: row for row in connection.execute(query).mappings()}
    common = place | {"revision": database.next_revision(connection), "registered_s": database.clock()}
    new: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    for item in registrations:
        old = present.get(item.name)
        values = _values(item, old, who)
        if values is None:
            continue
        (new if old is None else again).append(common | values | {"name": item.name})
        if old is not None and old["state"] != State.REGISTERED:
            forget_use(connection, database.base_digest, old["digest"])
    if new:
        connection.execute(insert(adapters), [{"generation": 0} | row for row in new])
    if again:
        columns = [column for column in again[0] if column not in (*place, "name")]
        statement = update(adapters).where(*mine, adapters.c.name == bindparam("key"))
        rows = [{"key": row["name"]} | {f"new_{column}": row[column] for column in columns} for row in again]
        connection.execute(statement.values({column: bindparam(f"new_{column}") for column in columns}), rows)
    changed = [(row["name"], display_source(row["uri"])) for row in (*new, *again)]
    if changed:
        notes = place | {"time_s": common["registered_s"]}
        event = notes | {"event": "registered lazily"}
        connection.execute(insert(events), [event | {"name": name, "detail": source} for name, source in changed])
        record = notes | {"who": who, "action": "register"}
        details = [(name, json.dumps({"uri": source}, ensure_ascii=False)) for name, source in changed]
        connection.execute(insert(audit), [record | {"name": name, "detail": detail} for name, detail in details])
    return RegistrationCounts(len(changed), len(registrations) - len(changed))


def _values(item: Registration, old: Any, who: str) -> dict[str, Any] | None:
    """The columns of a name's row that are not common to all; None if the row stays as it is. Raises InvalidRequest."""
    before = old if old is not None and old["state"] in LIVE_STATES else None
    if before is not None and before["state"] == State.LOADED:
        if item.source in (before["source"], before["uri"]):
            return None
        raise InvalidRequest(
            f"adapter {item.name!r} is loaded from {display_source(before['source'])!r}; to change its source, load it "
            "from there or unload it first: lazy registration does not replace an adapter that is served",
            param="path",
        )
    present: dict[str, Any] = {"traffic_weight": 1.0, "description": "", "defaults": ""}
    if before is not None:
        present = {column: before[column] for column in ("source", *present)}
    given = {
        "source": item.source,
        "traffic_weight": item.traffic_weight,
        "description": item.description,
        "defaults": item.defaults,
    }
    values = present | {column: value for column, value in given.items() if value is not None}
    if before is not None and values == present:
        return None
    return values | {
        "state": State.REGISTERED, "uri": item.source, "owner": who if before is None else before["owner"],
        "digest": "", "text": "", "max_rank": 0, "size_bytes": 0, "extra_bytes": 0, "is_zero": False,
        "has_score_head": False, "pinned": False, "invocation_tokens": "", "metadata": "",
    }  # fmt: skip


def _check_no_alias(connection: Connection, place: dict[str, str], names: Sequence[str]) -> None:
    query = select(aliases.c.name).where(
        aliases.c.base_digest == place["base_digest"],
        aliases.c.tenant_id == place["tenant_id"],
        aliases.c.name.in_(names),
        aliases.c.removed.is_(False),
    )
    if (taken := connection.scalar(query.limit(1))) is not None:
        raise InvalidRequest(f"{taken!r} is an alias; remove the alias or choose another name", param="name")
