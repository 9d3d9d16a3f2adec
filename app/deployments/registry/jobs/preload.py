"""Preloaded adapters: names that the configuration loads once, and never against an operator.

A start loads a name that the registry has never had, one whose configured path differs from before, and one whose
folder has moved together with the roots; and it updates a description that the configuration has changed. Whatever
operators have replaced, described, unloaded or made an alias since stays, and a registered adapter needs no source to
start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import delete, insert, select

from app.config import PreloadedAdapter
from app.deployments.registry.aliases import is_alias
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import adapters, name_condition, preloads
from app.deployments.registry.models import DEFAULT_TENANT, CatalogEntry, LoadRequest
from app.deployments.registry.registry import Registry
from app.deployments.registry.service import RegistryService
from app.deployments.rpc.background_tasks import call_in_daemon_thread
from app.engine.adapters.paths import resolve_adapter_path
from app.engine.errors import NotFound, UnsafeSource

logger = logging.getLogger(__name__)

#: How long the file systems of preloaded adapters may take to say where these are.
MAX_LOOK_S = 20.0


class PreloadChanges(NamedTuple):
    """What a configuration changes: adapters to load, and adapters with a new description."""

    to_load: list[PreloadedAdapter]
    redescribed: list[PreloadedAdapter]


class Preloads:
    """The sources and descriptions that configurations gave so far. Every call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def changes(self, preloaded: Sequence[PreloadedAdapter], *, tenant_id: str) -> PreloadChanges:
        """What is new in `preloaded`. For a name that others have registered, the source and description are only
        noted.
        """
        base_digest = self._database.base_digest
        changes = PreloadChanges([], [])
        with self._database.write() as connection:
            for item in preloaded:
                key = (base_digest, tenant_id, item.name)
                noted = connection.execute(
                    select(preloads.c.source, preloads.c.description).where(*name_condition(preloads, *key))
                ).first()
                if noted is not None and noted.source == item.path:
                    if item.description not in (None, noted.description):
                        changes.redescribed.append(item)
                    continue
                if is_alias(connection, *key):
                    logger.warning("%s is not preloaded from %s: it is an alias now", item.name, item.path)
                    continue
                is_known = connection.scalar(select(adapters.c.name).where(*name_condition(adapters, *key))) is not None
                if noted is None and is_known:
                    logger.info("%s is registered already and is not preloaded from %s", item.name, item.path)
                    connection.execute(insert(preloads).values(**_row(key, item)))
                else:
                    changes.to_load.append(item)
        return changes

    def done(self, item: PreloadedAdapter, *, tenant_id: str) -> None:
        """Note that it was loaded from this path and has this description."""
        key = (self._database.base_digest, tenant_id, item.name)
        with self._database.write() as connection:
            connection.execute(delete(preloads).where(*name_condition(preloads, *key)))
            connection.execute(insert(preloads).values(**_row(key, item)))


class Preloader:
    """Preloads the configured adapters once, however many callers ask; again after a failure or for other ones.

    One event loop. `roots`: the present roots of local adapters.
    """

    def __init__(self, registry: Registry, registry_service: RegistryService) -> None:
        self._registry, self._registry_service = registry, registry_service
        self._task: asyncio.Task[None] | None = None
        self._started: tuple[Sequence[PreloadedAdapter], Sequence[Path]] = ((), ())  # what the task preloads
        self.configure((), ())

    def configure(self, preloaded: Sequence[PreloadedAdapter], roots: Sequence[Path]) -> None:
        """The next `preload` loads these."""
        self._preloaded, self._roots = preloaded, roots

    async def preload(self) -> None:
        """Returns when all are served. Raises what makes a load fail."""
        wanted = self._preloaded, self._roots
        has_failed = self._task is not None and self._task.done() and self._task.exception() is not None
        if wanted != self._started or self._task is None or has_failed:
            self._started = wanted
            self._task = asyncio.create_task(self._load_new(*wanted))
        await asyncio.shield(self._task)

    async def _load_new(self, preloaded: Sequence[PreloadedAdapter], roots: Sequence[Path]) -> None:
        """Returns when all new adapters are served. Raises what makes a load fail; the other loads continue."""
        preloads_table = Preloads(self._registry.database)

        async def serve(item: PreloadedAdapter) -> None:
            present = await asyncio.to_thread(_entry_of, self._registry, item)
            if item in to_load:  # a moved adapter keeps its description
                description = item.description if present is None else present.description
                request = LoadRequest(DEFAULT_TENANT, item.name, item.path, "config", description=description)
                _, present = await self._registry_service.load_and_wait(request)
            if item in redescribed and present is not None:
                with suppress(NotFound):  # unloaded meanwhile
                    await self._registry_service.configure(
                        item.name, tenant_id=DEFAULT_TENANT, who="config", description=item.description
                    )
            await asyncio.to_thread(preloads_table.done, item, tenant_id=DEFAULT_TENANT)

        to_load, redescribed = await asyncio.to_thread(preloads_table.changes, preloaded, tenant_id=DEFAULT_TENANT)
        to_load += await _find_moved(self._registry, [item for item in preloaded if item not in to_load], roots)
        await asyncio.gather(*(serve(item) for item in preloaded if item in to_load or item in redescribed))


async def _find_moved(
    registry: Registry, items: Sequence[PreloadedAdapter], roots: Sequence[Path]
) -> list[PreloadedAdapter]:
    """The adapters that have moved; none if a file system hangs: a registered adapter needs no source to start."""
    looks = call_in_daemon_thread(lambda: [item for item in items if _has_moved(registry, item, roots)])
    try:
        async with asyncio.timeout(MAX_LOOK_S):
            return await asyncio.wrap_future(looks)
    except TimeoutError:
        logger.warning(
            "the file system of preloaded adapters does not answer within %g s; they are taken to be where they were",
            MAX_LOOK_S,
        )
        return []


def _has_moved(registry: Registry, item: PreloadedAdapter, roots: Sequence[Path]) -> bool:
    """Whether the adapter is still the configuration's, and its folder exists under the present roots but not where it
    was: a checkout was moved, or a root is mounted elsewhere.
    """
    entry = _entry_of(registry, item)
    if entry is None or "://" in item.path:
        return False
    return _is_there(item.path, roots) and not _is_there(entry.ref.uri, roots)


def _entry_of(registry: Registry, item: PreloadedAdapter) -> CatalogEntry | None:
    """The name's entry if it still comes from the configuration."""
    entry = registry.catalog.get(item.name, tenant_id=DEFAULT_TENANT)
    return entry if entry is not None and entry.source == item.path else None


def _is_there(path: str, roots: Sequence[Path]) -> bool:
    try:
        resolve_adapter_path(path, roots)
    except (NotFound, UnsafeSource):
        return False
    return True


def _row(key: tuple[str, str, str], item: PreloadedAdapter) -> dict[str, str | None]:
    base_digest, tenant_id, name = key
    place = {"base_digest": base_digest, "tenant_id": tenant_id, "name": name}
    return place | {"source": item.path, "description": item.description}
