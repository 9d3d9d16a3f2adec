"""What is kept for clients: files, batches and their answers, responses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "r0004"
down_revision = "r0003"


def _id() -> tuple[sa.Column[str], ...]:
    return (
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(128), nullable=False),
    )


def upgrade() -> None:
    op.create_table(
        "files",
        *_id(),
        sa.Column("filename", sa.String(256), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.Column("num_parts", sa.Integer),
        sa.Column("batch_id", sa.String(64)),
        sa.Column("is_error", sa.Boolean, nullable=False),
    )
    op.create_index("files_by_tenant", "files", ["base_digest", "tenant_id", "created_s", "id"])
    op.create_index("files_by_expiry", "files", ["base_digest", "expires_s"])
    op.create_table(
        "file_parts",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("file_id", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "batches",
        *_id(),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.Column("began_s", sa.Double),
        sa.Column("cancelling_s", sa.Double),
        sa.Column("ended_s", sa.Double),
        sa.Column("output_life_s", sa.Double, nullable=False),
        sa.Column("num_lines", sa.Integer, nullable=False),
        sa.Column("num_completed", sa.Integer, nullable=False),
        sa.Column("num_failed", sa.Integer, nullable=False),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("errors", sa.Text, nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("lease_s", sa.Double, nullable=False),
    )
    op.create_index("batches_by_tenant", "batches", ["base_digest", "tenant_id", "created_s", "id"])
    op.create_index("batches_by_status", "batches", ["base_digest", "status", "lease_s"])
    op.create_table(
        "batch_lines",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("batch_id", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("is_error", sa.Boolean, nullable=False),
        sa.Column("line", sa.Text, nullable=False),
    )
    op.create_table(
        "responses",
        *_id(),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("items", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("responses_by_tenant", "responses", ["base_digest", "tenant_id", "created_s", "id"])
    op.create_index("responses_by_expiry", "responses", ["base_digest", "expires_s"])
