"""What adapters say of themselves, for whoever lets the service choose one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0003"
down_revision = "r0002"


def upgrade() -> None:
    op.add_column("adapters", sa.Column("description", sa.Text, nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("description", sa.Text))
