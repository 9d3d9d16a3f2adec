"""The lines of a batch's file: what clients send, and what they get back.

In: a JSONL file, part by part. Out: its requests, or what is wrong with which line; and lines of answers. Rule: a file
is taken whole or not at all, and is never whole in memory; what a request's body may say is left to its route.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.deployments.ingress.error_responses import error_reply
from app.deployments.object_storage.models import LineResult
from app.redaction import holds_key, without_keys

#: Errors that are told of a file.
MAX_ERRORS = 100
_FIELDS = frozenset(("custom_id", "method", "url", "body"))
#: For a line that was not answered in time, and for all lines of a project that is no more.
EXPIRED = ("batch_expired", "the batch expired before this request was answered")
ARCHIVED = ("project_archived", "the batch's project is archived")


class NumberedBatchLine(NamedTuple):
    """A line as it stands in the file."""

    number: int
    text: bytes


class BatchLine(NamedTuple):
    """`number` counts lines of the file from 0, empty ones included."""

    number: int
    custom_id: str
    body: Mapping[str, Any]


class FileError(NamedTuple):
    """What is wrong with a file; `line` counts from 1, as editors do."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineSplitter:
    """The lines of a file that comes in parts, numbered from 0. Of one longer than `max_bytes` no more is kept than
    shows that it is."""

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes + 1
        self._partial = b""
        self._number = 0

    def push(self, part: bytes) -> list[NumberedBatchLine]:
        """The lines that this part ends."""
        first, *others = part.split(b"\n")
        self._partial += first[: self._most - len(self._partial)]
        if not others:
            return []
        *whole, partial = others
        lines = [self._partial, *(text[: self._most] for text in whole)]
        found = [NumberedBatchLine(self._number + index, text) for index, text in enumerate(lines)]
        self._number += len(lines)
        self._partial = partial[: self._most]
        return found

    def end(self) -> list[NumberedBatchLine]:
        """The last line, which nothing ends."""
        return [NumberedBatchLine(self._number, self._partial)]


class FileCheck:
    """Whether a file is taken: `num_lines` of requests so far, and what is wrong with it."""

    def __init__(self, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self._endpoint, self._max_lines, self._max_line_bytes = endpoint, max_lines, max_line_bytes
        self._errors: list[FileError] = []
        self._known: set[str] = set()
        self.num_lines = 0

    def add(self, lines: Sequence[NumberedBatchLine]) -> None:
        """Some lines more; empty ones are none."""
        for number, text in lines:
            if not text.strip():
                continue
            found = parse_line(number, text, self._endpoint, self._max_line_bytes)
            if isinstance(found, BatchLine) and found.custom_id in self._known:
                told = f"custom_id {found.custom_id[:80]!r} is there twice"
                found = FileError("duplicate_custom_id", told, number + 1)
            if isinstance(found, BatchLine):
                self._known.add(found.custom_id)
                self.num_lines += 1
            elif len(self._errors) < MAX_ERRORS:
                self._errors.append(found)

    def errors(self) -> list[FileError]:
        """All of them, once all lines have been added."""
        if not self.num_lines and not self._errors:
            return [FileError("empty_file", "the file has no requests")]
        if self.num_lines <= self._max_lines:
            return self._errors
        told = f"the file has {self.num_lines} requests; storage.max_batch_lines is {self._max_lines}"
        return [*self._errors, FileError("too_many_tasks", told)]


def parse_line(number: int, text: bytes, endpoint: str, max_bytes: int) -> BatchLine | FileError:
    """The request in a line, or what is wrong with it."""

    def wrong(code: str, message: str, param: str | None = None) -> FileError:
        return FileError(code, without_keys(message), number + 1, None if param is None else without_keys(param))

    if len(text) > max_bytes:
        return wrong("line_too_long", f"the line is longer than limits.max_body_bytes {max_bytes}")
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return wrong("invalid_json_line", "the line is not JSON")
    if not isinstance(line, dict):
        return wrong("invalid_request", 'the line is no object: {"custom_id", "method", "url", "body"}')
    if unknown := sorted(line.keys() - _FIELDS):
        return wrong("invalid_request", f"{unknown[0][:80]!r} is no field of a batch's request", unknown[0][:80])
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
        return wrong("invalid_custom_id", "custom_id is a text of 1 to 512 characters", "custom_id")
    if holds_key(custom_id):
        return wrong("invalid_custom_id", "custom_id holds an API key, and answers have it; leave it out", "custom_id")
    if line.get("method") != "POST":
        return wrong("invalid_method", "method is POST", "method")
    if line.get("url") != endpoint:
        return wrong("mismatched_endpoint", f"url is not the batch's endpoint {endpoint}", "url")
    body = line.get("body")
    if not isinstance(body, dict):
        return wrong("invalid_request", "body is the request: an object", "body")
    if body.get("stream"):
        return wrong("invalid_request", "a batch's answers are not streamed; leave stream out", "body.stream")
    return BatchLine(number, custom_id, body)


def result_line(line: BatchLine, request_id: str, body: Mapping[str, Any]) -> LineResult:
    """A line of the output file."""
    return _line_result(line, {"status_code": 200, "request_id": request_id, "body": body}, None)


def error_line(line: BatchLine, request_id: str, error: Exception) -> LineResult:
    """A line of the error file."""
    answer = error_reply(error)
    return _line_result(line, {"status_code": answer.status, "request_id": request_id, "body": answer.body}, None)


def unfinished_line(line: BatchLine, reason: tuple[str, str]) -> LineResult:
    """A line of the error file for a request that was not computed: a code and words."""
    return _line_result(line, None, {"code": reason[0], "message": reason[1]})


def _line_result(line: BatchLine, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> LineResult:
    told = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    is_error = error is not None or (response is not None and response["status_code"] != 200)
    return LineResult(line.number, is_error, json.dumps(told))  # ASCII: as many bytes as characters
