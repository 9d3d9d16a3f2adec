"""/v1/files in OpenAI's format: input and output files of batches.

A file belongs to the tenant of the key that uploaded it; other tenants get a 404. Uploads and downloads are streamed
part by part: this process never holds a whole file in memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, Response, StreamingResponse

from app.deployments.ingress.error_responses import BodyTooLarge
from app.deployments.ingress.http.openapi import BYTES, JSON_ERROR, takes_content
from app.deployments.ingress.http.request_parsing import (
    MAX_PAGE,
    Order,
    PageQuery,
    WholeNumber,
    page_body,
    read_form,
)
from app.deployments.ingress.http.routes.batches import DAY_S
from app.deployments.ingress.principal import inference_principal
from app.deployments.ingress.schemas.batches import MAX_LIFE_S, MIN_LIFE_S, FileObject
from app.deployments.ingress.schemas.response_model import DeletedResponse, PageResponse
from app.deployments.ingress.service import IngressService
from app.deployments.object_storage.models import StoredFile, unsupported_purpose_error
from app.engine.errors import InvalidRequest
from app.engine.scheduling.fair_limiter import FairSemaphore
from app.redaction import holds_key

#: Bytes per call to the database.
PART_BYTES = 1 << 20
#: Concurrent uploads of one ingress and of one project there.
MAX_UPLOADS, MAX_UPLOADS_PER_PROJECT = 8, 4


#: The form of an upload, for `/openapi.json`.
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_LIFE_S, "maximum": MAX_LIFE_S},
    },
}


class FileQuery(PageQuery):
    """OpenAI's pages have up to 10,000 files; these have fewer, and say that there are more."""

    limit: Annotated[int, WholeNumber(1, 10_000)] = MAX_PAGE
    purpose: str | None = None
    order: Order = "desc"


def add_file_routes(app: FastAPI, service: IngressService) -> None:
    uploads = FairSemaphore("uploads of files", MAX_UPLOADS, max_per_tenant=MAX_UPLOADS_PER_PROJECT, max_waiting=0)

    @app.post("/v1/files", response_model=FileObject, openapi_extra=takes_content("multipart/form-data", _FORM))
    async def create(request: Request) -> Response:
        """Upload a batch's input file: one JSON object per line."""
        caller = inference_principal(request)
        async with uploads.hold(caller.tenant_id):
            form = await read_form(
                request, service.storage_config.max_file_bytes, "storage.max_file_bytes", max_files=1
            )
            try:
                file = await _store_upload(form, service, caller.tenant_id)
            finally:
                await form.close()
        return JSONResponse(file_body(file))

    @app.get("/v1/files", response_model=PageResponse[FileObject])
    async def files(request: Request, query: Annotated[FileQuery, Query()]) -> Response:
        """List the caller's files, newest first unless `order` is asc."""
        found = await service.storage.file_page(
            tenant_id=inference_principal(request).tenant_id,
            limit=min(query.limit, MAX_PAGE),
            after=query.after,
            purpose=query.purpose,
            newest=query.order == "desc",
        )
        return JSONResponse(page_body([file_body(file) for file in found.files], has_more=found.has_more))

    @app.get("/v1/files/{file_id}", response_model=FileObject)
    async def file(request: Request, file_id: str) -> Response:
        """Retrieve a file's metadata."""
        tenant_id = inference_principal(request).tenant_id
        return JSONResponse(file_body(await service.storage.file(file_id, tenant_id=tenant_id)))

    @app.get("/v1/files/{file_id}/content", response_class=StreamingResponse, responses=BYTES | JSON_ERROR)
    async def content(request: Request, file_id: str) -> Response:
        """Download a file."""
        tenant_id = inference_principal(request).tenant_id
        found = await service.storage.file(file_id, tenant_id=tenant_id)
        headers = {"Content-Length": str(found.size_bytes)}
        parts = _parts(service, file_id, tenant_id)
        return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)

    @app.delete("/v1/files/{file_id}", response_model=DeletedResponse)
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file."""
        await service.storage.delete_file(file_id, tenant_id=inference_principal(request).tenant_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def file_body(file: StoredFile) -> dict[str, Any]:
    """A file in OpenAI's format."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_s),
        "expires_at": int(file.expires_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


async def _store_upload(form: FormData, service: IngressService, tenant_id: str) -> StoredFile:
    config = service.storage_config
    upload, purpose = form.get("file"), form.get("purpose")
    if unknown := sorted(set(form) - {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}):
        raise InvalidRequest(f"{unknown[0][:80]!r} is not a field of an upload", param=unknown[0][:80])
    if purpose != "batch":
        raise unsupported_purpose_error(str(purpose))
    if not isinstance(upload, UploadFile) or not upload.size:
        raise InvalidRequest("file is missing or empty; send one request per line", param="file")
    if upload.size > config.max_file_bytes:
        raise BodyTooLarge(f"the file has {upload.size} bytes; storage.max_file_bytes is {config.max_file_bytes}")
    life_s = min(config.retention_days * DAY_S, _life_s(form))
    name = upload.filename or "upload.jsonl"
    if holds_key(name):
        raise InvalidRequest("the file's name contains an API key; rename the file", param="file")
    file = await service.storage.begin_file(
        name[-256:], "batch", upload.size, tenant_id=tenant_id, life_s=life_s, max_bytes=config.max_tenant_bytes
    )
    number = 0
    while content := await upload.read(PART_BYTES):
        await service.storage.add_part(file.id, number, content)
        number += 1
    await service.storage.end_file(file.id, number, tenant_id=tenant_id)
    return file


def _life_s(form: FormData) -> float:
    seconds = form.get("expires_after[seconds]")
    if seconds is None:
        return float(MAX_LIFE_S)
    text = str(seconds)
    if not (text.isascii() and text.isdigit() and MIN_LIFE_S <= int(text[:12]) <= MAX_LIFE_S):
        raise InvalidRequest(
            f"expires_after.seconds is {text[:40]!r}; it must be from {MIN_LIFE_S} to {MAX_LIFE_S}",
            param="expires_after",
        )
    return float(text)


async def _parts(service: IngressService, file_id: str, tenant_id: str) -> AsyncGenerator[bytes]:
    number = 0
    while (part := await service.storage.file_part(file_id, number, tenant_id=tenant_id)) is not None:
        if part:
            yield part
        number += 1
