"""Names that are registered without being read: their adapter is read when a request first uses it, or when asked.

In: names and places, up to thousands in one call. Out: names that are listed as REGISTERED, and a load for each that is
used. Rule: to register costs no look at a source, so a place that holds nothing is met by the first request; each name
is read once however many ask, and one that could not be read is not tried again for a while. What a load does is
`loading`'s; which requests wait for one is the ingress'.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from app.deployments.registry.catalog import not_registered
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import adapters, aliases, audit, events
from app.deployments.registry.feed.view import Key
from app.deployments.registry.jobs.auto_registration import Failures, remembered, words
from app.deployments.registry.last_used import forget_use
from app.deployments.registry.models import (
    MAX_REGISTRATIONS,
    MEANT_STATES,
    CatalogEntry,
    LoadRequest,
    Registered,
    Registration,
    RegistryJob,
    State,
    check_description,
    check_source,
)
from app.deployments.registry.registry import Registry
from app.deployments.registry.service import RegistryService
from app.deployments.rpc.background_tasks import SingleFlight, Tasks
from app.engine.adapters.combining.combination import shown_source
from app.engine.errors import (
    AdapterQuarantined,
    AdapterUnreadable,
    CompositionRefused,
    InvalidRequest,
    Overloaded,
    PolyloraError,
)
from app.logging import LogEvent

logger = logging.getLogger(__name__)

#: What a request that met a failure is told to wait at least, in seconds.
FIRST_S = 5.0


class LazyRegistrations:
    """One event loop; the database is called in threads. `failures`: names that could not be read a moment ago."""

    def __init__(self, registry: Registry, lifecycle: RegistryService, failures: Failures) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._failures = failures
        self._tasks = Tasks()
        self._pending: SingleFlight[Key, tuple[RegistryJob, CatalogEntry]] = SingleFlight(self._tasks)

    async def register(self, registrations: Sequence[Registration], *, tenant_id: str, who: str) -> Registered:
        """All of them or none; every ingress knows them when this returns.

        A name that is loaded from the same place stays so. Raises InvalidRequest for a name that cannot be one, is an
        alias's, comes twice or is loaded from another place, UnsafeSource, AdapterQuotaError.
        """
        check_together(registrations)
        for item in registrations:
            self._lifecycle.check_name(item.name)
            check_source(item.source)
            check_description(item.description)
        database, check_quota = self._registry.database, self._registry.catalog.check_quota
        counts: list[Registered] = []

        def write() -> Registered | None:
            with database.write() as connection:
                counts.append(_write(connection, database, registrations, tenant_id, who))
                check_quota(connection, tenant_id)
            return counts[-1] if counts[-1].num_changed else None

        await self._lifecycle.published.change(write)
        for item in registrations:
            self._failures.clear(words((tenant_id, item.name)))
        logger.info(LogEvent("adapters registered unread", number=counts[-1].num_changed, tenant=tenant_id, by=who))
        return counts[-1]

    async def read(self, name: str, *, tenant_id: str, who: str) -> tuple[RegistryJob | None, CatalogEntry]:
        """Have every ingress serve the name; no job if that is so already. Raises NotFound, and what reading raises."""
        key = (tenant_id, name)
        entry = await asyncio.to_thread(self._registry.catalog.get, name, tenant_id=tenant_id)
        if entry is None:
            raise not_registered(name)
        if entry.is_read:
            return None, entry
        return await asyncio.shield(self._pending.task(key, lambda: self._load(entry, who)))

    async def read_for_request(self, name: str, *, tenant_id: str, who: str) -> None:
        """`read`; what a request hears of a failure names no place of this server: the job and the log do.

        Raises AdapterUnreadable, also for a while after a failure; NotReady while the database is away.
        """
        try:
            if (tenant_id, name) not in self._pending:
                self._failures.check(words((tenant_id, name)), f"adapter {name!r}")
            await self.read(name, tenant_id=tenant_id, who=f"first use by {who}")
        except (Overloaded, CompositionRefused):
            raise
        except PolyloraError as error:
            wait_s = error.retry_after_s if isinstance(error, AdapterQuarantined) else FIRST_S
            raise AdapterUnreadable(
                f"adapter {name!r} is registered but cannot be read at the moment, and is tried again in "
                f"{math.ceil(wait_s)} s; whoever manages it sees why at GET /v1/loras/{name}",
                retry_after_s=wait_s,
            ) from None

    def close(self) -> None:
        """Begin nothing any more; loads that have begun are the lifecycle's."""
        self._tasks.cancel()

    async def _load(self, entry: CatalogEntry, who: str) -> tuple[RegistryJob, CatalogEntry]:
        request = LoadRequest(entry.tenant_id, entry.name, entry.source, who, description=entry.description or None)
        with remembered(self._failures, (entry.tenant_id, entry.name)):
            return await self._lifecycle.load_and_wait(request)


def check_together(registrations: Sequence[Registration]) -> None:
    """Raises InvalidRequest for none, too many, and a name that comes twice."""
    if not 1 <= len(registrations) <= MAX_REGISTRATIONS:
        raise InvalidRequest(
            f"{len(registrations)} adapters in one call; it takes 1 to {MAX_REGISTRATIONS}: send several",
            param="adapters",
        )
    name, times = Counter(item.name for item in registrations).most_common(1)[0]
    if times > 1:
        raise InvalidRequest(f"the name {name[:80]!r} comes {times} times; a name has one place", param="adapters")


def _write(
    connection: Connection, database: Database, registrations: Sequence[Registration], tenant_id: str, who: str
) -> Registered:
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
    changed = [(row["name"], shown_source(row["uri"])) for row in (*new, *again)]
    if changed:
        notes = place | {"time_s": common["registered_s"]}
        event = notes | {"event": "registered unread"}
        connection.execute(insert(events), [event | {"name": name, "detail": source} for name, source in changed])
        asked = notes | {"who": who, "action": "register"}
        details = [(name, json.dumps({"uri": source}, ensure_ascii=False)) for name, source in changed]
        connection.execute(insert(audit), [asked | {"name": name, "detail": detail} for name, detail in details])
    return Registered(len(changed), len(registrations) - len(changed))


def _values(item: Registration, old: Any, who: str) -> dict[str, Any] | None:
    """A name's row without what all have in common; None: it stays as it is. Raises InvalidRequest."""
    before = old if old is not None and old["state"] in MEANT_STATES else None
    if before is not None and before["state"] == State.LOADED:
        if item.source in (before["source"], before["uri"]):
            return None
        raise InvalidRequest(
            f"adapter {item.name!r} is loaded from {shown_source(before['source'])!r}; load it from another place, or "
            "unload it first: a name that is served is not given up for one that nobody has read",
            param="path",
        )
    kept: dict[str, Any] = {"traffic_weight": 1.0, "description": ""}
    if before is not None:
        kept = {column: before[column] for column in ("source", *kept)}
    asked = {"source": item.source, "traffic_weight": item.traffic_weight, "description": item.description}
    values = kept | {column: value for column, value in asked.items() if value is not None}
    if before is not None and values == kept:
        return None
    return values | {
        "state": State.REGISTERED, "uri": item.source, "owner": who if before is None else before["owner"],
        "digest": "", "text": "", "max_rank": 0, "size_bytes": 0, "extra_bytes": 0, "pinned": False,
        "invocation_tokens": "", "metadata": "",
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
