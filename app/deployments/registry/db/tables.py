"""The registry's tables, which `Database` creates in an empty database.

Every row belongs to one base model, so services of different bases can share a database. Times are Unix seconds. A
`revision` is the number of the change that wrote a row (`feed.change_query`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Double,
    Index,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    Text,
    and_,
    or_,
)

from app.model_names import split_version

metadata = MetaData()

#: The version of all tables in `metadata`, as of release 0.1.0. A change raises it, and needs a migration.
SCHEMA_VERSION = 5

#: The type of autoincrement ids: 64 bits in every database. SQLite autoincrements only INTEGER columns.
COUNTER = BigInteger().with_variant(Integer, "sqlite")


def _name_key() -> tuple[Column[str], Column[str], Column[str]]:
    """The primary key of a name: names belong to a tenant and a base model."""
    return (
        Column("base_digest", String(64), primary_key=True),
        Column("tenant_id", String(128), primary_key=True),
        Column("name", String(128), primary_key=True),
    )


#: One row: the `SCHEMA_VERSION` that created the tables.
schema_versions = Table("schema_versions", metadata, Column("version", Integer, primary_key=True, autoincrement=False))


def _public_id(prefix: str) -> Column[str]:
    """A random id that does not reveal how many rows there are; `id` gives their order."""
    return Column("public_id", String(48), nullable=False, default=lambda: f"{prefix}_{secrets.token_hex(12)}")


#: One row per base model: a random `id`, and the `revision` that rises with every change of a name or alias.
registries = Table(
    "registries",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("id", String(32), nullable=False),
    Column("revision", BigInteger, nullable=False),
)

#: The processes that serve a registry: `actor` outlives their restarts, `beat_s` is the last heartbeat, `revision`
#: what all its ingresses have, `settings` what it last works with.
stores = Table(
    "stores",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("id", String(32), primary_key=True),
    Column("actor", String(128), nullable=False),
    Column("beat_s", Double, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("settings", Text),
)

#: One row per name that was ever registered: what it means now. `state` is REGISTERED, LOADED, DRAINING or REMOVED;
#: `generation` is the highest the name ever had; `source` is as requested, `uri` its canonical form.
#: `invocation_tokens` are ids separated by spaces, `metadata` and `defaults` are JSON objects or empty.
adapters = Table(
    "adapters",
    metadata,
    *_name_key(),
    Column("owner", String(256), nullable=False),
    Column("state", String(16), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("uri", Text, nullable=False),
    Column("max_rank", Integer, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("traffic_weight", Double, nullable=False),
    Column("registered_s", Double, nullable=False),
    Column("source", Text, nullable=False),
    Column("extra_bytes", BigInteger, nullable=False),
    Column("is_zero", Boolean, nullable=False),
    Column("has_score_head", Boolean, nullable=False),
    Column("text", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("invocation_tokens", Text, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("defaults", Text, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Index("adapters_by_contents", "base_digest", "digest", "state", "revision"),
    Index("adapters_by_revision", "base_digest", "revision"),
)

#: All generations of each name.
generations = Table(
    "generations",
    metadata,
    *_name_key(),
    Column("generation", Integer, primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("uri", Text, nullable=False),
    Column("max_rank", Integer, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("registered_s", Double, nullable=False),
    Column("registered_by", String(256), nullable=False),
    Index("generations_by_digest", "base_digest", "digest"),
)

#: Load and unload jobs (`kind`): `state` is a `models.State`, `reason` why it failed, `owner` the store that works
#: on it, `number` its place in the order of requests.
jobs = Table(
    "jobs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("base_digest", String(64), nullable=False),
    Column("tenant_id", String(128), nullable=False),
    Column("name", String(128), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("source", Text, nullable=False),
    Column("pinned", Boolean),
    Column("traffic_weight", Double),
    Column("state", String(16), nullable=False),
    Column("reason", Text),
    Column("generation", Integer),
    Column("digest", String(64)),
    Column("requested_by", String(256), nullable=False),
    Column("created_s", Double, nullable=False),
    Column("updated_s", Double, nullable=False),
    Column("owner", String(32), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("description", Text),
    Column("defaults", Text),
    Index("jobs_by_name", "base_digest", "tenant_id", "name", "number"),
    Index("jobs_by_state", "base_digest", "state"),
)

#: A name that stands for others. `version` is in force, `previous_version` is what a rollback returns to.
aliases = Table(
    "aliases",
    metadata,
    *_name_key(),
    Column("version", Integer, nullable=False),
    Column("previous_version", Integer),
    Column("last_version", Integer, nullable=False),
    Column("removed", Boolean, nullable=False),
    Column("updated_s", Double, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Index("aliases_by_revision", "base_digest", "revision"),
)

alias_targets = Table(
    "alias_targets",
    metadata,
    *_name_key(),
    Column("version", Integer, primary_key=True),
    Column("target", String(128), primary_key=True),
    Column("weight", Double, nullable=False),
)

#: What happened to adapters; `replica_id` is the replica of an event on a device.
events = Table(
    "events",
    metadata,
    Column("id", COUNTER, primary_key=True, autoincrement=True),
    Column("base_digest", String(64), nullable=False),
    Column("tenant_id", String(128), nullable=False),
    Column("name", String(128), nullable=False),
    Column("generation", Integer),
    Column("digest", String(64)),
    Column("event", String(64), nullable=False),
    Column("detail", Text),
    Column("replica_id", String(128)),
    Column("time_s", Double, nullable=False),
    _public_id("evt"),
    Index("events_by_public_id", "base_digest", "public_id", unique=True),
    Index("events_by_name", "base_digest", "tenant_id", "name", "id"),
    Index("events_by_tenant", "base_digest", "tenant_id", "id"),
    sqlite_autoincrement=True,
)

#: Who requested which change.
audit = Table(
    "audit",
    metadata,
    Column("id", COUNTER, primary_key=True, autoincrement=True),
    Column("base_digest", String(64), nullable=False),
    Column("tenant_id", String(128), nullable=False),
    Column("who", String(256), nullable=False),
    Column("action", String(64), nullable=False),
    Column("name", String(128), nullable=False),
    Column("detail", Text, nullable=False),
    Column("time_s", Double, nullable=False),
    _public_id("audit"),
    Index("audit_by_public_id", "base_digest", "public_id", unique=True),
    Index("audit_by_name", "base_digest", "tenant_id", "name", "id"),
    Index("audit_by_tenant", "base_digest", "tenant_id", "id"),
    sqlite_autoincrement=True,
)

#: The source and description that a configuration last gave a preloaded name; only a difference is acted on.
preloads = Table(
    "preloads", metadata, *_name_key(), Column("source", Text, nullable=False), Column("description", Text)
)

#: When requests last used a digest: a new replica loads the most recent ones before it is ready.
uses = Table(
    "uses",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("digest", String(64), primary_key=True),
    Column("last_used_s", Double, nullable=False),
    Index("uses_by_time", "base_digest", "last_used_s"),
)


def name_condition(table: Table, base_digest: str, tenant_id: str, name: str) -> tuple[ColumnElement[bool], ...]:
    """The condition for one name's rows; of adapters and generations, a name with a version has only that version's."""
    plain, version = split_version(name) if table in (adapters, generations) else (name, None)
    place = (table.c.base_digest == base_digest, table.c.tenant_id == tenant_id, table.c.name == plain)
    if version is None:
        return place
    if version.generation is not None:
        return (*place, table.c.generation == version.generation)
    return (*place, table.c.digest.startswith(version.digest_prefix))


def rows_after(
    query: Select[Any], table: Table, last: Mapping[Any, Any] | None, *, is_newest_first: bool = False
) -> Select[Any]:
    """The query's rows in order of creation; after the row `last`, if it is given."""
    time_s, row_id = table.c.created_s, table.c.id
    if last is not None:
        later, beside = (
            (time_s < last["created_s"], row_id < last["id"])
            if is_newest_first
            else (time_s > last["created_s"], row_id > last["id"])
        )
        query = query.where(or_(later, and_(time_s == last["created_s"], beside)))
    return query.order_by(*(column.desc() if is_newest_first else column for column in (time_s, row_id)))
