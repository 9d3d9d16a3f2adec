"""Generations, jobs, aliases, events, audit and the hot set; names belong to a base model.

The names of the first registry, which had a database file per base model, are taken over with their
generations.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.rename_table("adapters", "adapters_0001")
    _create_tables()
    _take_over(context.config.attributes["base_digest"])
    op.drop_table("adapters_0001")


def _key() -> list[sa.Column]:  # type: ignore[type-arg]
    """Columns that begin the primary key of everything that has a name. New objects at each call."""
    return [
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
    ]


def _place() -> list[sa.Column]:  # type: ignore[type-arg]
    return [
        sa.Column("base_digest", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(128), nullable=False),
    ]


def _contents() -> list[sa.Column]:  # type: ignore[type-arg]
    return [
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("uri", sa.Text, nullable=False),
        sa.Column("max_rank", sa.Integer, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
    ]


def _create_tables() -> None:
    op.create_table(
        "adapters",
        *_key(),
        sa.Column("owner", sa.String(256), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        *_contents(),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("traffic_weight", sa.Double, nullable=False),
        sa.Column("registered_s", sa.Double, nullable=False),
        sa.Column("last_used_s", sa.Double),
    )
    op.create_index("adapters_by_digest", "adapters", ["base_digest", "digest"])
    op.create_table(
        "generations",
        *_key(),
        sa.Column("generation", sa.Integer, primary_key=True),
        *_contents()[1:],
        sa.Column("registered_s", sa.Double, nullable=False),
        sa.Column("registered_by", sa.String(256), nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        *_place(),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("pinned", sa.Boolean),
        sa.Column("traffic_weight", sa.Double),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("generation", sa.Integer),
        sa.Column("digest", sa.String(64)),
        sa.Column("requested_by", sa.String(256), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("updated_s", sa.Double, nullable=False),
    )
    op.create_index("jobs_by_name", "jobs", ["base_digest", "tenant_id", "name", "created_s"])
    op.create_index("jobs_by_state", "jobs", ["base_digest", "state"])
    op.create_table(
        "aliases",
        *_key(),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("previous_version", sa.Integer),
        sa.Column("last_version", sa.Integer, nullable=False),
        sa.Column("removed", sa.Boolean, nullable=False),
        sa.Column("updated_s", sa.Double, nullable=False),
    )
    op.create_table(
        "alias_targets",
        *_key(),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("target", sa.String(128), primary_key=True),
        sa.Column("weight", sa.Double, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        *_place(),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("generation", sa.Integer),
        sa.Column("digest", sa.String(64)),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("detail", sa.Text),
        sa.Column("replica_id", sa.String(128)),
        sa.Column("time_s", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_by_name", "events", ["base_digest", "tenant_id", "name", "id"])
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        *_place(),
        sa.Column("who", sa.String(256), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("time_s", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_by_name", "audit", ["base_digest", "tenant_id", "name", "id"])
    op.create_table(
        "hot_set",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
    )


def _take_over(base_digest: str) -> None:
    names = "tenant_id, name, generation, digest, uri, max_rank, size_bytes, registered_s"
    taking = {
        "adapters": (
            "owner, state, pinned, traffic_weight",
            "'default', CASE removed WHEN 0 THEN 'LOADED' ELSE 'REMOVED' END, false, 1.0",
        ),
        "generations": ("registered_by", "'default'"),
    }
    for table, (columns, values) in taking.items():
        op.execute(
            sa.text(
                f"INSERT INTO {table} (base_digest, {names}, {columns}) "
                f"SELECT :base_digest, {names}, {values} FROM adapters_0001"
            ).bindparams(base_digest=base_digest)
        )
