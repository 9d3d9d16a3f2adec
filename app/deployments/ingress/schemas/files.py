"""Bodies of /v1/files, as OpenAI's client reads them."""

from __future__ import annotations

from typing import Literal

from app.deployments.ingress.schemas.response_model import ResponseModel, Seconds


class FileObject(ResponseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: Seconds
    expires_at: Seconds
    filename: str
    purpose: str
    status: Literal["processed"]
