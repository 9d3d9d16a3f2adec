"""Adapters that a configuration names: loaded once, and never against an operator.

In: names and places, as often as the service starts. Out: a load of each that is news: a name that the registry has
never known, one that the configuration has at another place than before, or one whose folder has moved together with
the roots. What operators have replaced, unloaded or turned into an alias since then stays as they left it, and what is
registered needs no source to start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import delete, insert, select

from app.config import PreloadedAdapter
from app.deployments.registry.aliases import is_alias
from app.deployments.registry.books import Registry
from app.deployments.registry.database import Database
from app.deployments.registry.entries import LoadRequest
from app.deployments.registry.tables import adapters, named, preloads
from app.engine.adapters.paths import resolve_adapter_path
from app.engine.errors import NotFound, UnsafeSource

logger = logging.getLogger(__name__)


class Preloads:
    """What configurations have had loaded. Every call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def news(self, wanted: Sequence[PreloadedAdapter], *, tenant_id: str) -> list[PreloadedAdapter]:
        """Those of the wanted that are to be loaded. Of others that the registry knows the place is noted."""
        base_digest = self._database.base_digest
        found = []
        with self._database.write() as connection:
            for item in wanted:
                key = (base_digest, tenant_id, item.name)
                source = connection.scalar(select(preloads.c.source).where(*named(preloads, *key)))
                if source == item.path:
                    continue
                if is_alias(connection, *key):
                    logger.warning("%s is not preloaded from %s: it is an alias now", item.name, item.path)
                    continue
                is_known = connection.scalar(select(adapters.c.name).where(*named(adapters, *key))) is not None
                if source is None and is_known:
                    logger.info("%s is registered, and not preloaded from %s", item.name, item.path)
                    connection.execute(insert(preloads).values(**_row(key, item)))
                else:
                    found.append(item)
        return found

    def done(self, item: PreloadedAdapter, *, tenant_id: str) -> None:
        """It was loaded from there."""
        key = (self._database.base_digest, tenant_id, item.name)
        with self._database.write() as connection:
            connection.execute(delete(preloads).where(*named(preloads, *key)))
            connection.execute(insert(preloads).values(**_row(key, item)))


async def preload(
    registry: Registry,
    load: Callable[[LoadRequest], Awaitable[Any]],
    wanted: Sequence[PreloadedAdapter],
    *,
    tenant_id: str,
    roots: Sequence[Path] = (),
) -> None:
    """Returns when all that is news is served. Raises what makes a load fail; the others go on.

    `roots`: where local adapters are read now.
    """
    book = Preloads(registry.database)

    async def one(item: PreloadedAdapter) -> None:
        await load(LoadRequest(tenant_id, item.name, item.path, "config"))
        await asyncio.to_thread(book.done, item, tenant_id=tenant_id)

    def to_load() -> list[PreloadedAdapter]:
        news = book.news(wanted, tenant_id=tenant_id)
        return [item for item in wanted if item in news or _has_moved(registry, item, tenant_id, roots)]

    await asyncio.gather(*map(one, await asyncio.to_thread(to_load)))


def _has_moved(registry: Registry, item: PreloadedAdapter, tenant_id: str, roots: Sequence[Path]) -> bool:
    """Whether the adapter is still the configuration's, and its folder is under today's roots but no more where it was:
    a checkout that was moved, a root that was mounted elsewhere."""
    entry = registry.catalog.get(item.name, tenant_id=tenant_id)
    if entry is None or entry.source != item.path or "://" in item.path:
        return False
    return _is_there(item.path, roots) and not _is_there(entry.ref.uri, roots)


def _is_there(path: str, roots: Sequence[Path]) -> bool:
    try:
        resolve_adapter_path(path, roots)
    except (NotFound, UnsafeSource):
        return False
    return True


def _row(key: tuple[str, str, str], item: PreloadedAdapter) -> dict[str, str]:
    base_digest, tenant_id, name = key
    return {"base_digest": base_digest, "tenant_id": tenant_id, "name": name, "source": item.path}
