"""Rows of the table `adapters`: reading them as `CatalogEntry`s, and the values that the catalog writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, select

from app.config import MAX_DESCRIPTION_CHARS
from app.deployments.registry.db.tables import adapters
from app.deployments.registry.feed.view import Entry, Key
from app.deployments.registry.models import LIVE_STATES, CatalogEntry, LoadRequest, State
from app.engine.adapters.card import AdapterCard, AdapterRef

#: Rows fetched at a time: converting a million rows at once would exceed the server's idle-in-transaction timeout.
_READ_AT_ONCE = 5_000
#: Unloaded names of a digest that get events of its moves: with a name per version there can be thousands.
MAX_UNLOADED_NAMES = 8


def ref_of(row: Mapping[Any, Any]) -> AdapterRef:
    """The reference in a row of `adapters` or of `generations`."""
    return AdapterRef(row["name"], row["digest"], row["tenant_id"], row["generation"], row["uri"])


def entry_of(row: Mapping[Any, Any]) -> CatalogEntry:
    return CatalogEntry(
        ref=ref_of(row),
        max_rank=row["max_rank"],
        size_bytes=row["size_bytes"],
        registered_s=row["registered_s"],
        owner=row["owner"],
        pinned=row["pinned"],
        traffic_weight=row["traffic_weight"],
        last_used_s=row.get("last_used_s"),
        source=row["source"],
        extra_bytes=row["extra_bytes"],
        is_zero=row["is_zero"],
        has_score_head=row["has_score_head"],
        text=row["text"],
        description=row["description"],
        invocation_tokens=tuple(map(int, row["invocation_tokens"].split())),
        metadata=row["metadata"],
        defaults=row["defaults"],
    )


def next_generation(old: Mapping[Any, Any] | None, digest: str) -> int:
    """The generation of contents `digest` under a name whose row was `old`: it rises if the contents differ, or if the
    name was not in service.
    """
    if old is None:
        return 1
    return int(old["generation"] + (old["digest"] != digest or old["state"] != State.LOADED))


def card_values(card: AdapterCard) -> dict[str, Any]:
    """The columns of `adapters` that come from a card."""
    return {
        "digest": card.digest,
        "max_rank": card.max_rank,
        "size_bytes": card.size_bytes + len(card.text.encode()),  # both are stored for the tenant
        "extra_bytes": card.extra_bytes,
        "is_zero": card.is_zero,
        "has_score_head": card.has_score_head,
        "text": card.text,
        "description": card.description,
        "invocation_tokens": " ".join(map(str, card.invocation_tokens)),
        "metadata": card.metadata,
    }


def merged_settings(old: Mapping[Any, Any] | None, request: LoadRequest, card: AdapterCard) -> dict[str, Any]:
    """A name's owner, pin, weight, description and generation defaults after a load: as requested, else as before while
    the name was in service, else as for a new name. A description of the card comes before the present one.
    """
    before: Mapping[Any, Any] = {} if old is None or old["state"] not in LIVE_STATES else old
    pinned, traffic_weight = request.pinned, request.traffic_weight
    description = card.description[:MAX_DESCRIPTION_CHARS] or before.get("description", "")
    return {
        "owner": before.get("owner", request.who),
        "pinned": before.get("pinned", False) if pinned is None else pinned,
        "traffic_weight": before.get("traffic_weight", 1.0) if traffic_weight is None else traffic_weight,
        "description": description if request.description is None else request.description,
        "defaults": before.get("defaults", "") if request.defaults is None else request.defaults,
    }


def changed_adapters(connection: Connection, base_digest: str, after: int) -> list[tuple[int, Key, Entry | None]]:
    """(revision, key, entry or None if removed) of changes after `after`; after 0: only entries that exist."""
    query = select(adapters).where(adapters.c.base_digest == base_digest)
    order: Sequence[ColumnElement[Any]] = (adapters.c.tenant_id, adapters.c.name)
    if after:  # ordered by the index on revision: PostgreSQL's cursor would otherwise walk all names in their order
        query, order = query.where(adapters.c.revision > after), (adapters.c.revision, *order)
    else:
        query = query.where(adapters.c.state.in_(LIVE_STATES))
    query = query.execution_options(yield_per=_READ_AT_ONCE)
    return [
        (row["revision"], (row["tenant_id"], row["name"]), entry_of(row) if row["state"] in LIVE_STATES else None)
        for row in connection.execute(query.order_by(*order)).mappings()
    ]


def names_of_digests(
    connection: Connection, base_digest: str, digests: Collection[str], leaving: Collection[str]
) -> Sequence[RowMapping]:
    """The names with these contents (`is_live`: in service), and of those that are `leaving` the last
    `MAX_UNLOADED_NAMES` that are no longer registered."""
    is_live = adapters.c.state.in_(LIVE_STATES).label("is_live")
    query = select(adapters.c.name, adapters.c.tenant_id, adapters.c.generation, adapters.c.digest, is_live)
    query = query.where(adapters.c.base_digest == base_digest)
    present = query.where(adapters.c.digest.in_(digests), adapters.c.state.in_((*LIVE_STATES, State.DRAINING)))
    rows = list(connection.execute(present).mappings())
    for digest in leaving:
        removed = query.where(adapters.c.digest == digest, adapters.c.state == State.REMOVED)
        last = removed.order_by(adapters.c.revision.desc()).limit(MAX_UNLOADED_NAMES)
        rows += connection.execute(last).mappings()
    return rows
