"""Unloads say from their beginning what they unload. Those that do not were cut short, and are over."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.execute(sa.text("UPDATE jobs SET state = 'REMOVED' WHERE kind = 'unload' AND state = 'DRAINING'"))
    op.execute(sa.text("UPDATE adapters SET state = 'REMOVED' WHERE state = 'DRAINING'"))
