"""The first registry: one table of names. Databases that were made before revisions existed have it already."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    if sa.inspect(op.get_bind()).has_table("adapters"):
        return
    op.create_table(
        "adapters",
        sa.Column("tenant_id", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("uri", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("max_rank", sa.Integer, nullable=False),
        sa.Column("size_bytes", sa.Integer, nullable=False),
        sa.Column("registered_s", sa.Float, nullable=False),
        sa.Column("removed", sa.Integer, nullable=False),
    )
