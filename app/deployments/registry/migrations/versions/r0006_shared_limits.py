"""What is taken of limits while several processes lend them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0006"
down_revision = "r0005"


def upgrade() -> None:
    op.create_table(
        "shared_limits",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("project_id", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("model", sa.String(128), primary_key=True),
        sa.Column("state", sa.Text, nullable=False),
    )
