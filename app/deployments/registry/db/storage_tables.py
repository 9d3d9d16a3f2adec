"""The tables of the object storage, in the registry's schema; a change of one raises `SCHEMA_VERSION`.

Every row belongs to one base model and one tenant. Times are Unix seconds.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, LargeBinary, String, Table, Text

from app.deployments.registry.db.tables import metadata


def _id() -> tuple[Column[str], Column[str], Column[str]]:
    return (
        Column("base_digest", String(64), primary_key=True),
        Column("id", String(64), primary_key=True),
        Column("tenant_id", String(128), nullable=False),
    )


#: A file: an upload in `file_parts`, or a batch's output (`batch_id`), whose contents are in `batch_lines`.
#: `num_parts` is null until the upload is complete.
files = Table(
    "files",
    metadata,
    *_id(),
    Column("filename", String(256), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double, nullable=False),
    Column("num_parts", Integer),
    Column("batch_id", String(64)),
    Column("is_error", Boolean, nullable=False),
    Index("files_by_tenant", "base_digest", "tenant_id", "created_s", "id"),
    Index("files_by_expiry", "base_digest", "expires_s"),
)

file_parts = Table(
    "file_parts",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("file_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

#: `owner` is the process that works on it; `lease_s` changes with each of its writes and is 0 without an owner.
#: `key_id` pays; `note` (JSON) is the client's metadata, `errors` (JSON) what is wrong with the input file.
batches = Table(
    "batches",
    metadata,
    *_id(),
    Column("key_id", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(64), nullable=False),
    Column("status", String(16), nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double, nullable=False),
    Column("began_s", Double),
    Column("cancelling_s", Double),
    Column("ended_s", Double),
    Column("output_life_s", Double, nullable=False),
    Column("num_lines", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("note", Text, nullable=False),
    Column("errors", Text, nullable=False),
    Column("owner", String(128), nullable=False),
    Column("lease_s", Double, nullable=False),
    Index("batches_by_tenant", "base_digest", "tenant_id", "created_s", "id"),
    Index("batches_by_status", "base_digest", "status", "lease_s"),
)

#: A batch's output: one row per input line, written once.
batch_lines = Table(
    "batch_lines",
    metadata,
    Column("base_digest", String(64), primary_key=True),
    Column("batch_id", String(64), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("is_error", Boolean, nullable=False),
    Column("line", Text, nullable=False),
)

#: Stored responses. `items` (JSON) is the conversation up to the response, `body` (JSON) the response.
responses = Table(
    "responses",
    metadata,
    *_id(),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("items", Text, nullable=False),
    Column("body", Text, nullable=False),
    Index("responses_by_tenant", "base_digest", "tenant_id", "created_s", "id"),
    Index("responses_by_expiry", "base_digest", "expires_s"),
)
