"""What was asked for when a name was loaded, beside the place that it turned out to be."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("adapters", sa.Column("source", sa.Text, nullable=False, server_default=""))
    op.execute("UPDATE adapters SET source = uri")
