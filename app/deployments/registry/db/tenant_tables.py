"""The tables of tenants, in the registry's schema; a change of one raises `SCHEMA_VERSION`.

Every row belongs to one base model. Times are Unix seconds. A revoked key keeps its row: audit and usage refer to it,
and a service that ever had keys never becomes open again. A row's `revision` is the number of the last change that is
published, so watchers read only newer rows.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, String, Table, Text

from app.deployments.registry.db.tables import COUNTER, metadata


def _id() -> tuple[Column[str], Column[str]]:
    return (Column("base_digest", String(64), primary_key=True), Column("id", String(64), primary_key=True))


#: A tenant. `model_mode` says whether `model_ids` (JSON) are allowed or denied; `salt_secret` is 64 hex digits;
#: `hub_token` is encrypted (`SecretCipher`).
projects = Table(
    "projects",
    metadata,
    *_id(),
    Column("name", String(256), nullable=False),
    Column("created_s", Double, nullable=False),
    Column("archived_s", Double),
    Column("weight", Double, nullable=False),
    Column("enforce", Boolean, nullable=False),
    Column("salt_secret", String(64), nullable=False),
    Column("salt_version", Integer, nullable=False),
    Column("model_mode", String(16)),
    Column("model_ids", Text, nullable=False),
    Column("max_concurrent", Integer),
    Column("max_adapters", Integer),
    Column("max_adapter_bytes", BigInteger),
    Column("spend_cents", BigInteger),
    Column("calls_per_min", Integer),
    Column("hub_token", Text),
    Column("revision", BigInteger, nullable=False),
    Index("projects_by_time", "base_digest", "created_s", "id"),
    Index("projects_by_revision", "base_digest", "revision"),
)

service_accounts = Table(
    "service_accounts",
    metadata,
    *_id(),
    Column("project_id", String(64), nullable=False),
    Column("name", String(256), nullable=False),
    Column("role", String(16), nullable=False),
    Column("created_s", Double, nullable=False),
    Column("deleted_s", Double),
    Index("service_accounts_by_project", "base_digest", "project_id", "created_s", "id"),
)

#: API keys; `digest` is the key's SHA-256, `role` its service account's. An admin key has neither project nor account.
api_keys = Table(
    "api_keys",
    metadata,
    *_id(),
    Column("digest", String(64), nullable=False),
    Column("is_admin", Boolean, nullable=False),
    Column("project_id", String(64)),
    Column("service_account_id", String(64)),
    Column("role", String(16), nullable=False),
    Column("name", String(256), nullable=False),
    Column("redacted", String(64), nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double),
    Column("revoked_s", Double),
    Column("last_used_s", Double),
    Column("revision", BigInteger, nullable=False),
    Index("api_keys_by_digest", "base_digest", "digest", unique=True),
    Index("api_keys_by_project", "base_digest", "project_id", "created_s", "id"),
    Index("api_keys_by_revision", "base_digest", "revision"),
)

#: A project's rate limits; null: no limit. The base model's row limits the whole project; a row of an adapter or
#: alias (by `model_id`) limits that one in addition.
rate_limits = Table(
    "rate_limits",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("project_id", String(64), primary_key=True),
    Column("model", String(256), primary_key=True),
    Column("requests_per_min", BigInteger),
    Column("tokens_per_min", BigInteger),
    Column("requests_per_day", BigInteger),
)

#: Adapter names that one project shares with another.
adapter_shares = Table(
    "adapter_shares",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("owner_id", String(64), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("project_id", String(64), primary_key=True),
)

#: Who changed what; `detail` is JSON.
tenant_audit = Table(
    "tenant_audit",
    metadata,
    Column("id", COUNTER, primary_key=True, autoincrement=True),
    Column("base_digest", String(64), nullable=False),
    Column("event", String(64), nullable=False),
    Column("actor", String(64), nullable=False),
    Column("project_id", String(64)),
    Column("target", String(256), nullable=False),
    Column("detail", Text, nullable=False),
    Column("time_s", Double, nullable=False),
    Index("tenant_audit_by_base", "base_digest", "id"),
    sqlite_autoincrement=True,
)

#: Rises with each change of the tables above, so that other processes notice it.
tenant_revisions = Table(
    "tenant_revisions",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("number", BigInteger, nullable=False),
)

#: Usage per minute, project, key, model and digest. `route_kind` is completions or embeddings.
ledger = Table(
    "ledger",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("minute", Integer, primary_key=True),
    Column("project_id", String(64), primary_key=True),
    Column("key_id", String(64), primary_key=True),
    Column("model", String(128), primary_key=True),  # `usage.recorder.MAX_MODEL_CHARS`
    Column("digest", String(64), primary_key=True),
    Column("route_kind", String(16), primary_key=True),
    Column("num_requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("num_loads", BigInteger, nullable=False),
    Column("load_bytes", BigInteger, nullable=False),
    Column("cost_nanos", BigInteger, nullable=False),
    Column("rank_row_ms", BigInteger, nullable=False),
    Column("kv_block_ms", BigInteger, nullable=False),
    Index("ledger_by_project", "base_digest", "project_id", "minute"),
)

#: The number of each writer's last flush in the ledger; a writer sends them in order.
ledger_writers = Table(
    "ledger_writers",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("writer_id", String(64), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("time_s", Double, nullable=False),
)
