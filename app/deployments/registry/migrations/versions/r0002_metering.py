"""What requests hold of an engine is in the ledger: rank rows and KV blocks, times milliseconds."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0002"
down_revision = "r0001"


def upgrade() -> None:
    for name in ("rank_row_ms", "kv_block_ms"):
        op.add_column("ledger", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
