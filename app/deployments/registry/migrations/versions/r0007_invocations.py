"""Which tokens activate an adapter, of those that are activated in the middle of a prompt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0007"
down_revision = "r0006"


def upgrade() -> None:
    op.add_column("adapters", sa.Column("invocation_tokens", sa.Text, nullable=False, server_default=""))
