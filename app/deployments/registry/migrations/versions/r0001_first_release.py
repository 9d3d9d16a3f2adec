"""The registry of the first release: names, what they have meant, jobs, aliases, events, audit and the hot set."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0001"
down_revision = None


def upgrade() -> None:
    _names()
    _jobs()
    _aliases()
    _journal()
    _hot_set()


def _names() -> None:
    op.create_table(
        "adapters",
        *_key(),
        sa.Column("owner", sa.String(256), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        *_contents(),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("traffic_weight", sa.Double, nullable=False),
        sa.Column("registered_s", sa.Double, nullable=False),
        sa.Column("last_used_s", sa.Double),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("extra_bytes", sa.BigInteger, nullable=False),
    )
    op.create_index("adapters_by_digest", "adapters", ["base_digest", "digest"])
    op.create_table(
        "generations",
        *_key(),
        sa.Column("generation", sa.Integer, primary_key=True),
        *_contents(),
        sa.Column("registered_s", sa.Double, nullable=False),
        sa.Column("registered_by", sa.String(256), nullable=False),
    )


def _jobs() -> None:
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


def _aliases() -> None:
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


def _journal() -> None:
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


def _hot_set() -> None:
    op.create_table(
        "hot_set",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
    )


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
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("uri", sa.Text, nullable=False),
        sa.Column("max_rank", sa.Integer, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
    ]
