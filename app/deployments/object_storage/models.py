"""Messages of the object storage: files, batches and responses, as they travel between processes.

Times are Unix seconds. Every call names a tenant; another tenant's object raises the same NotFound as a missing one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.engine.errors import InvalidRequest, PolyloraError
from app.engine.wire_format import message

BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
#: Statuses of batches that still need work.
OPEN: tuple[BatchStatus, ...] = ("validating", "in_progress", "cancelling")


class StorageQuotaExceeded(PolyloraError):
    """A tenant's storage limit is reached; waiting helps only when something expires."""


class LeaseLost(PolyloraError):
    """Another process has taken over the batch."""


@message
@dataclass(frozen=True, slots=True)
class StoredFile:
    """`batch_id`: the batch that wrote the file; `is_error` tells its error file from its output file."""

    id: str
    filename: str
    purpose: str
    size_bytes: int
    created_s: float
    expires_s: float
    batch_id: str | None = None
    is_error: bool = False


@message
@dataclass(frozen=True, slots=True)
class NewBatch:
    """`window_s`: how long the batch may run; `output_life_s`: how long its output files are stored; `max_open`: how
    many unfinished batches the tenant may have; `max_bytes`: how many bytes it may store. `key_id` pays; `note` is the
    client's metadata as JSON.
    """

    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    window_s: float
    output_life_s: float
    max_open: int
    max_bytes: int
    note: str = "{}"


@message
@dataclass(frozen=True, slots=True)
class Batch:
    """`began_s` and `ended_s`: when its first line could start and when its last one was answered. `key_id` pays."""

    id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    status: BatchStatus
    created_s: float
    expires_s: float
    began_s: float | None = None
    cancelling_s: float | None = None
    ended_s: float | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    note: str = "{}"
    errors: str = "[]"


@message
class LineResult(NamedTuple):
    """One line of a batch's output file, as JSON, or of its error file (`is_error`)."""

    number: int
    is_error: bool
    line: str


@message
@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`items`: the conversation that the response answers; `body`: the response; both JSON."""

    id: str
    items: str
    body: str


@message
class FilePage(NamedTuple):
    """Newest or oldest first."""

    files: tuple[StoredFile, ...]
    has_more: bool


@message
class BatchPage(NamedTuple):
    """Newest first."""

    batches: tuple[Batch, ...]
    has_more: bool


def unsupported_purpose_error(purpose: str) -> InvalidRequest:
    """Only batch input files are supported."""
    return InvalidRequest(f"purpose is {purpose[:40]!r}; only purpose 'batch' is supported", param="purpose")
