"""What an adapter holds on a device beside its rank rows. Older registrations say 0 until they are loaded again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("adapters", sa.Column("extra_bytes", sa.BigInteger, nullable=False, server_default="0"))
