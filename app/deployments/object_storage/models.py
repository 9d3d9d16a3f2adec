"""What is kept for clients, as it travels between processes: files, batches, responses.

In: rows of the database. Out: frozen values for ingresses. Times are Unix seconds. Rule: whoever asks for one gives the
tenant whose it is; another tenant's is NotFound, in the words for what was never there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.engine.errors import InvalidRequest, NotFound, PolyloraError
from app.engine.wire_format import message
from app.redaction import without_keys

BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
#: A batch that somebody works on, or has to.
OPEN: tuple[BatchStatus, ...] = ("validating", "in_progress", "cancelling")


class StorageQuotaExceeded(PolyloraError):
    """A tenant keeps as much here as it may. Waiting helps only once something of it expires."""


class LeaseLost(PolyloraError):
    """Another process works on the batch by now."""


@message
@dataclass(frozen=True, slots=True)
class StoredFile:
    """`batch_id`: the batch that it is the output of, or, `is_error`, the lines that failed."""

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
    """What is asked for. `window_s`: for how long it may run; `output_life_s`: for how long its answers are kept;
    `max_open`: how many of the tenant's may run at once. `key_id` pays for it; `note` is the client's own JSON."""

    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    window_s: float
    output_life_s: float
    max_open: int
    note: str = "{}"


@message
@dataclass(frozen=True, slots=True)
class Batch:
    """`began_s` and `ended_s`: when its first line could run, and when its last had. `key_id` pays for it."""

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
    """A line of a batch's output, JSON; or, `is_error`, of its error file."""

    number: int
    is_error: bool
    line: str


@message
@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`items` is the conversation that it answers, `body` the response; both JSON."""

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


def not_found_error(what: str, id_: str) -> NotFound:
    """For one that is not there, and for another tenant's. Ray keeps what is raised in an actor, and shows it."""
    return NotFound(f"there is no {what} {without_keys(id_)[:80]!r}")


def unsupported_purpose_error(purpose: str) -> InvalidRequest:
    """For files that nothing here is done with."""
    return InvalidRequest(f"purpose is {purpose[:40]!r}; files are for batches here: purpose batch", param="purpose")
