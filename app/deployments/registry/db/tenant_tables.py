"""The tables of tenants, beside the registry's and in the same schema.

In: nothing. Out: SQLAlchemy's tables, which the books read and write; a change of one raises the registry's
`SCHEMA_VERSION`. Every row belongs to one base model. Times are Unix seconds.
A key that is revoked keeps its row: the audit and usage name it, and a service that ever had keys never opens again.
The `revision` of a row is the number of the last change of what is published of it: who has seen a change reads what is
newer.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, String, Table, Text

from app.deployments.registry.db.tables import COUNTER, metadata


def _id() -> tuple[Column[str], Column[str]]:
    return (Column("base_digest", String(64), primary_key=True), Column("id", String(64), primary_key=True))


#: A tenant. `model_ids` (JSON) are allowed or denied as `model_mode` says; `salt_secret` is 64 hexadecimal digits.
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

#: API keys; `digest` is the key's SHA-256. An admin key has no project and no service account.
api_keys = Table(
    "api_keys",
    metadata,
    *_id(),
    Column("digest", String(64), nullable=False),
    Column("is_admin", Boolean, nullable=False),
    Column("project_id", String(64)),
    Column("service_account_id", String(64)),
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

#: What a project may ask of a model in a minute or a day; null: as much as it likes. The base model's row holds for
#: everything of the project, an adapter's or alias's row for that name alone, beside it.
rate_limits = Table(
    "rate_limits",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("project_id", String(64), primary_key=True),
    Column("model", String(128), primary_key=True),
    Column("requests_per_min", BigInteger),
    Column("tokens_per_min", BigInteger),
    Column("requests_per_day", BigInteger),
)

#: Names that a project lets another use.
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
    Column("target", String(128), nullable=False),
    Column("detail", Text, nullable=False),
    Column("time_s", Double, nullable=False),
    Index("tenant_audit_by_base", "base_digest", "id"),
    sqlite_autoincrement=True,
)

#: Rises with each change of the tables above: whoever else has the database open sees that there is news.
tenant_revisions = Table(
    "tenant_revisions",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("number", BigInteger, nullable=False),
)

#: What was used: a row per minute, project, key, model and contents. `route_kind` is completions or embeddings.
ledger = Table(
    "ledger",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("minute", Integer, primary_key=True),
    Column("project_id", String(64), primary_key=True),
    Column("key_id", String(64), primary_key=True),
    Column("model", String(128), primary_key=True),  # `counting.MAX_MODEL_CHARS`
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
)

#: Which batches of each writer are in the ledger: the highest number, as each writer sends them in order.
ledger_writers = Table(
    "ledger_writers",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("writer_id", String(64), primary_key=True),
    Column("number", BigInteger, nullable=False),
    Column("time_s", Double, nullable=False),
)
