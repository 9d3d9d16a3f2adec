"""Adapters that a configuration names: loaded once, and never against an operator.

In: names, places and descriptions, as often as the service starts. Out: a load of each that is news: a name that the
registry has never known, one that the configuration has at another place than before, or one whose folder has moved
together with the roots; and another description of one that the configuration describes otherwise than before. What
operators have replaced, described, unloaded or turned into an alias since then stays as they left it, and what is
registered needs no source to start.
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
from app.deployments.registry.models import CatalogEntry, LoadRequest
from app.deployments.registry.registry import Registry
from app.deployments.registry.service import RegistryService
from app.engine.adapters.paths import resolve_adapter_path
from app.engine.errors import NotFound, UnsafeSource

logger = logging.getLogger(__name__)


class PreloadNews(NamedTuple):
    """Of what a configuration names: what is to be loaded, and what it describes otherwise than before."""

    to_load: list[PreloadedAdapter]
    redescribed: list[PreloadedAdapter]


class Preloads:
    """What configurations have had loaded. Every call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def news(self, wanted: Sequence[PreloadedAdapter], *, tenant_id: str) -> PreloadNews:
        """Of the wanted. Where others have registered a name, the place and the description are noted."""
        base_digest = self._database.base_digest
        news = PreloadNews([], [])
        with self._database.write() as connection:
            for item in wanted:
                key = (base_digest, tenant_id, item.name)
                noted = connection.execute(
                    select(preloads.c.source, preloads.c.description).where(*name_condition(preloads, *key))
                ).first()
                if noted is not None and noted.source == item.path:
                    if item.description not in (None, noted.description):
                        news.redescribed.append(item)
                    continue
                if is_alias(connection, *key):
                    logger.warning("%s is not preloaded from %s: it is an alias now", item.name, item.path)
                    continue
                is_known = connection.scalar(select(adapters.c.name).where(*name_condition(adapters, *key))) is not None
                if noted is None and is_known:
                    logger.info("%s is registered, and not preloaded from %s", item.name, item.path)
                    connection.execute(insert(preloads).values(**_row(key, item)))
                else:
                    news.to_load.append(item)
        return news

    def done(self, item: PreloadedAdapter, *, tenant_id: str) -> None:
        """It was loaded from there, and described so."""
        key = (self._database.base_digest, tenant_id, item.name)
        with self._database.write() as connection:
            connection.execute(delete(preloads).where(*name_condition(preloads, *key)))
            connection.execute(insert(preloads).values(**_row(key, item)))


async def preload(
    registry: Registry,
    lifecycle: RegistryService,
    wanted: Sequence[PreloadedAdapter],
    *,
    tenant_id: str,
    roots: Sequence[Path] = (),
) -> None:
    """Returns when all that is news is served. Raises what makes a load fail; the others go on.

    `roots`: where local adapters are read now.
    """
    book = Preloads(registry.database)

    def news() -> PreloadNews:
        found = book.news(wanted, tenant_id=tenant_id)
        to_load = [item for item in wanted if item in found.to_load or _has_moved(registry, item, tenant_id, roots)]
        return found._replace(to_load=to_load)

    async def serve(item: PreloadedAdapter) -> None:
        present = await asyncio.to_thread(_entry_of, registry, item, tenant_id)
        if item in to_load:  # one that has moved stays described as it was
            description = item.description if present is None else present.description
            request = LoadRequest(tenant_id, item.name, item.path, "config", description=description)
            _, present = await lifecycle.load_and_wait(request)
        if item in redescribed and present is not None:
            with suppress(NotFound):  # unloaded in this moment
                await lifecycle.configure(item.name, tenant_id=tenant_id, who="config", description=item.description)
        await asyncio.to_thread(book.done, item, tenant_id=tenant_id)

    to_load, redescribed = await asyncio.to_thread(news)
    await asyncio.gather(*(serve(item) for item in wanted if item in to_load or item in redescribed))


def _has_moved(registry: Registry, item: PreloadedAdapter, tenant_id: str, roots: Sequence[Path]) -> bool:
    """Whether the adapter is still the configuration's, and its folder is under today's roots but no more where it was:
    a checkout that was moved, a root that was mounted elsewhere."""
    entry = _entry_of(registry, item, tenant_id)
    if entry is None or "://" in item.path:
        return False
    return _is_there(item.path, roots) and not _is_there(entry.ref.uri, roots)


def _entry_of(registry: Registry, item: PreloadedAdapter, tenant_id: str) -> CatalogEntry | None:
    """What the name means, if that is still the configuration's."""
    entry = registry.catalog.get(item.name, tenant_id=tenant_id)
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
