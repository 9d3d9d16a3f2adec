"""Request and response bodies of /v1/batches and /v1/files, in OpenAI's format."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.deployments.ingress.schemas.request_model import Body, Metadata
from app.deployments.ingress.schemas.response_model import ResponseModel, Seconds

#: Lifetime of files: an hour to 30 days, OpenAI's limits.
MIN_LIFE_S, MAX_LIFE_S = 3600, 2_592_000


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)


class BatchBody(Body):
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank",
        "/v1/classify",
    ]  # fmt: skip
    input_file_id: str = Field(max_length=64)
    completion_window: Literal["24h"]
    metadata: Metadata | None = Field(default=None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


class BatchError(ResponseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(ResponseModel):
    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(ResponseModel):
    total: int
    completed: int
    failed: int


class BatchResponse(ResponseModel):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: Seconds
    in_progress_at: Seconds | None
    expires_at: Seconds | None
    finalizing_at: Seconds | None
    completed_at: Seconds | None
    failed_at: Seconds | None
    expired_at: Seconds | None
    cancelling_at: Seconds | None
    cancelled_at: Seconds | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class FileObject(ResponseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: Seconds
    expires_at: Seconds
    filename: str
    purpose: str
    status: Literal["processed"]
