"""The first release's schema: names and their history, jobs, events, stores, tenants, files, batches, responses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0001"
down_revision = None

#: 64 bits in every database; SQLite counts up in a column of this very type only.
_COUNTER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _registries()
    _names()
    _jobs()
    _aliases()
    _journal()
    _uses()
    _tenants()
    _tenant_rights()
    _tenant_usage()
    _files()
    _batches()
    _responses()


def _registries() -> None:
    op.create_table(
        "registries",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "stores",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("beat_s", sa.Double, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("settings", sa.Text),
    )


def _names() -> None:
    op.create_table(
        "adapters",
        *_key(),
        sa.Column("owner", sa.String(256), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("generation", sa.Integer, nullable=False),
        *_contents(),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("traffic_weight", sa.Double, nullable=False),
        sa.Column("registered_s", sa.Double, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("extra_bytes", sa.BigInteger, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("invocation_tokens", sa.Text, nullable=False),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("adapters_by_digest", "adapters", ["base_digest", "digest"])
    op.create_index("adapters_by_revision", "adapters", ["base_digest", "revision"])
    op.create_table(
        "generations",
        *_key(),
        sa.Column("generation", sa.Integer, primary_key=True),
        *_contents(),
        sa.Column("registered_s", sa.Double, nullable=False),
        sa.Column("registered_by", sa.String(256), nullable=False),
    )
    op.create_index("generations_by_digest", "generations", ["base_digest", "digest"])


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        *_place(),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("pinned", sa.Boolean),
        sa.Column("traffic_weight", sa.Double),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("generation", sa.Integer),
        sa.Column("digest", sa.String(64)),
        sa.Column("requested_by", sa.String(256), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("updated_s", sa.Double, nullable=False),
        sa.Column("owner", sa.String(32), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("description", sa.Text),
    )
    op.create_index("jobs_by_name", "jobs", ["base_digest", "tenant_id", "name", "number"])
    op.create_index("jobs_by_state", "jobs", ["base_digest", "state"])


def _aliases() -> None:
    op.create_table(
        "aliases",
        *_key(),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("previous_version", sa.Integer),
        sa.Column("last_version", sa.Integer, nullable=False),
        sa.Column("removed", sa.Boolean, nullable=False),
        sa.Column("updated_s", sa.Double, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("aliases_by_revision", "aliases", ["base_digest", "revision"])
    op.create_table(
        "alias_targets",
        *_key(),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("target", sa.String(128), primary_key=True),
        sa.Column("weight", sa.Double, nullable=False),
    )


def _journal() -> None:
    op.create_table(
        "events",
        sa.Column("id", _COUNTER, primary_key=True, autoincrement=True),
        *_place(),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("generation", sa.Integer),
        sa.Column("digest", sa.String(64)),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("detail", sa.Text),
        sa.Column("replica_id", sa.String(128)),
        sa.Column("time_s", sa.Double, nullable=False),
        sa.Column("public_id", sa.String(48), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_by_public_id", "events", ["base_digest", "public_id"], unique=True)
    op.create_index("events_by_name", "events", ["base_digest", "tenant_id", "name", "id"])
    op.create_index("events_by_tenant", "events", ["base_digest", "tenant_id", "id"])
    op.create_table(
        "audit",
        sa.Column("id", _COUNTER, primary_key=True, autoincrement=True),
        *_place(),
        sa.Column("who", sa.String(256), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("time_s", sa.Double, nullable=False),
        sa.Column("public_id", sa.String(48), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_by_public_id", "audit", ["base_digest", "public_id"], unique=True)
    op.create_index("audit_by_name", "audit", ["base_digest", "tenant_id", "name", "id"])
    op.create_index("audit_by_tenant", "audit", ["base_digest", "tenant_id", "id"])


def _uses() -> None:
    op.create_table(
        "preloads", *_key(), sa.Column("source", sa.Text, nullable=False), sa.Column("description", sa.Text)
    )
    op.create_table(
        "uses",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("last_used_s", sa.Double, nullable=False),
    )
    op.create_index("uses_by_time", "uses", ["base_digest", "last_used_s"])


def _tenants() -> None:
    op.create_table(
        "projects",
        *_id(),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("archived_s", sa.Double),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("enforce", sa.Boolean, nullable=False),
        sa.Column("salt_secret", sa.String(64), nullable=False),
        sa.Column("salt_version", sa.Integer, nullable=False),
        sa.Column("model_mode", sa.String(16)),
        sa.Column("model_ids", sa.Text, nullable=False),
        sa.Column("max_concurrent", sa.Integer),
        sa.Column("max_adapters", sa.Integer),
        sa.Column("max_adapter_bytes", sa.BigInteger),
        sa.Column("spend_cents", sa.BigInteger),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("projects_by_time", "projects", ["base_digest", "created_s", "id"])
    op.create_index("projects_by_revision", "projects", ["base_digest", "revision"])
    op.create_table(
        "service_accounts",
        *_id(),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("deleted_s", sa.Double),
    )
    op.create_index("service_accounts_by_project", "service_accounts", ["base_digest", "project_id", "created_s", "id"])
    op.create_table(
        "api_keys",
        *_id(),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("is_admin", sa.Boolean, nullable=False),
        sa.Column("project_id", sa.String(64)),
        sa.Column("service_account_id", sa.String(64)),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("redacted", sa.String(64), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double),
        sa.Column("revoked_s", sa.Double),
        sa.Column("last_used_s", sa.Double),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("api_keys_by_digest", "api_keys", ["base_digest", "digest"], unique=True)
    op.create_index("api_keys_by_project", "api_keys", ["base_digest", "project_id", "created_s", "id"])
    op.create_index("api_keys_by_revision", "api_keys", ["base_digest", "revision"])


def _tenant_rights() -> None:
    op.create_table(
        "rate_limits",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("project_id", sa.String(64), primary_key=True),
        sa.Column("model", sa.String(128), primary_key=True),
        sa.Column("requests_per_min", sa.BigInteger),
        sa.Column("tokens_per_min", sa.BigInteger),
        sa.Column("requests_per_day", sa.BigInteger),
    )
    op.create_table(
        "adapter_shares",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("owner_id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("project_id", sa.String(64), primary_key=True),
    )
    op.create_table(
        "tenant_audit",
        sa.Column("id", _COUNTER, primary_key=True, autoincrement=True),
        sa.Column("base_digest", sa.String(64), nullable=False),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64)),
        sa.Column("target", sa.String(128), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("time_s", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("tenant_audit_by_base", "tenant_audit", ["base_digest", "id"])
    op.create_table(
        "tenant_revisions",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
    )


def _tenant_usage() -> None:
    op.create_table(
        "ledger",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("minute", sa.Integer, primary_key=True),
        sa.Column("project_id", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(64), primary_key=True),
        sa.Column("model", sa.String(128), primary_key=True),
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("route_kind", sa.String(16), primary_key=True),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_loads", sa.BigInteger, nullable=False),
        sa.Column("load_bytes", sa.BigInteger, nullable=False),
        sa.Column("cost_nanos", sa.BigInteger, nullable=False),
        sa.Column("rank_row_ms", sa.BigInteger, nullable=False),
        sa.Column("kv_block_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "ledger_writers",
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("writer_id", sa.String(64), primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("time_s", sa.Double, nullable=False),
    )


def _files() -> None:
    op.create_table(
        "files",
        *_id(),
        sa.Column("tenant_id", sa.String(128), nullable=False),
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


def _batches() -> None:
    op.create_table(
        "batches",
        *_id(),
        sa.Column("tenant_id", sa.String(128), nullable=False),
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


def _responses() -> None:
    op.create_table(
        "responses",
        *_id(),
        sa.Column("tenant_id", sa.String(128), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("items", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("responses_by_tenant", "responses", ["base_digest", "tenant_id", "created_s", "id"])
    op.create_index("responses_by_expiry", "responses", ["base_digest", "expires_s"])


def _id() -> list[sa.Column]:  # type: ignore[type-arg]
    return [
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("id", sa.String(64), primary_key=True),
    ]


def _key() -> list[sa.Column]:  # type: ignore[type-arg]
    """Columns that begin the primary key of everything that has a name. New objects at each call."""
    return [
        sa.Column("base_digest", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(128), primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
    ]


def _place() -> list[sa.Column]:  # type: ignore[type-arg]
    return [
        sa.Column("base_digest", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(128), nullable=False),
    ]


def _contents() -> list[sa.Column]:  # type: ignore[type-arg]
    return [
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("uri", sa.Text, nullable=False),
        sa.Column("max_rank", sa.Integer, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
    ]
