"""Pages of everything that happened to a tenant's names, in the order in which it did."""

from __future__ import annotations

from alembic import op

revision = "r0005"
down_revision = "r0004"


def upgrade() -> None:
    for table in ("events", "audit"):
        op.create_index(f"{table}_by_tenant", table, ["base_digest", "tenant_id", "id"])
