"""JSONL files of batches: validation of input lines, and output and error lines.

A file is accepted completely or rejected, and never held in memory as a whole. Request bodies are checked later, by
their route.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.deployments.ingress.error_responses import InvalidJson, error_reply
from app.deployments.ingress.json_parser import parse_json
from app.deployments.object_storage.models import LineResult
from app.engine.errors import InvalidRequest
from app.redaction import holds_key, without_keys

#: Reported errors per file.
MAX_ERRORS = 100
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_FIELDS = frozenset(("custom_id", "method", "url", "body"))
#: Error codes and messages of lines that expired, of an archived project's lines, and of those without a valid key.
EXPIRED = ("batch_expired", "the batch expired before this request was answered")
ARCHIVED = ("project_archived", "the batch's project is archived")
KEY_REVOKED = ("key_revoked", "the batch's API key was revoked, has expired, or may no longer run inference")


class NumberedBatchLine(NamedTuple):
    """A raw line of the file."""

    number: int
    text: bytes


class BatchLine(NamedTuple):
    """A parsed request; `number` counts the file's lines from 0, including empty ones."""

    number: int
    custom_id: str
    body: Mapping[str, Any]


class FileError(NamedTuple):
    """A validation error; `line` counts from 1, like in an editor."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class TooManyLines(InvalidRequest):
    """A file has more than twice as many lines as a batch may have requests."""


class LineSplitter:
    """Splits a file that arrives in parts into lines. Lines longer than `max_bytes` are cut to `max_bytes + 1`, and
    empty ones are counted and left out.
    """

    def __init__(self, max_bytes: int, max_lines: int) -> None:
        """max_lines: of requests; with empty lines a file may have twice as many."""
        self._max_stored, self._max_lines = max_bytes + 1, max_lines
        self._partial = b""
        self._number = 0

    def push(self, part: bytes) -> list[NumberedBatchLine]:
        """The lines that this part completes. Takes milliseconds for a part of a mebibyte. Raises TooManyLines."""
        if self._number + part.count(b"\n") > 2 * self._max_lines:
            raise TooManyLines(
                f"the file has more than {2 * self._max_lines} lines; storage.max_batch_lines is {self._max_lines}"
            )
        first, *others = part.split(b"\n")
        self._partial += first[: self._max_stored - len(self._partial)]
        if not others:
            return []
        *whole, partial = others
        lines = [self._partial, *(text[: self._max_stored] for text in whole)]
        numbered = _not_empty(self._number, lines)
        self._number += len(lines)
        self._partial = partial[: self._max_stored]
        return numbered

    def end(self) -> list[NumberedBatchLine]:
        """The last line, which has no newline."""
        return _not_empty(self._number, [self._partial])


def _not_empty(number: int, lines: Sequence[bytes]) -> list[NumberedBatchLine]:
    """The lines with more than white space, numbered from `number`."""
    return [NumberedBatchLine(number + index, text) for index, text in enumerate(lines) if text and not text.isspace()]


class FileCheck:
    """Validates a file. `num_lines`: requests so far."""

    def __init__(self, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self._endpoint, self._max_lines, self._max_line_bytes = endpoint, max_lines, max_line_bytes
        self._errors: list[FileError] = []
        self._known: set[str] = set()
        self.num_lines = 0

    def add(self, lines: Sequence[NumberedBatchLine]) -> None:
        """Check more lines."""
        for number, text in lines:
            found = parse_line(number, text, self._endpoint, self._max_line_bytes)
            if isinstance(found, BatchLine) and found.custom_id in self._known:
                message = f"custom_id {found.custom_id[:80]!r} is used twice"
                found = FileError("duplicate_custom_id", message, number + 1)
            if isinstance(found, BatchLine):
                self._known.add(found.custom_id)
                self.num_lines += 1
            elif len(self._errors) < MAX_ERRORS:
                self._errors.append(found)

    def errors(self) -> list[FileError]:
        """The errors of the file, after all lines have been added."""
        if not self.num_lines and not self._errors:
            return [FileError("empty_file", "the file has no requests")]
        if self.num_lines <= self._max_lines:
            return self._errors
        message = f"the file has {self.num_lines} requests; storage.max_batch_lines is {self._max_lines}"
        return [*self._errors, FileError("too_many_tasks", message)]


def parse_line(number: int, text: bytes, endpoint: str, max_bytes: int) -> BatchLine | FileError:
    """The request in a line, or its error."""

    def wrong(code: str, message: str, param: str | None = None) -> FileError:
        return FileError(code, without_keys(message), number + 1, None if param is None else without_keys(param))

    if len(text) > max_bytes:
        return wrong("line_too_long", f"the line is longer than limits.max_body_bytes {max_bytes}")
    try:
        line = parse_json(text, "the line")
    except InvalidJson as error:
        return wrong("invalid_json_line", str(error))
    if not isinstance(line, dict):
        return wrong("invalid_request", 'the line is not an object: {"custom_id", "method", "url", "body"}')
    if unknown := sorted(line.keys() - _FIELDS):
        return wrong("invalid_request", f"{unknown[0][:80]!r} is not a field of a batch request", unknown[0][:80])
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
        return wrong("invalid_custom_id", "custom_id must be a string of 1 to 512 characters", "custom_id")
    if holds_key(custom_id):
        return wrong("invalid_custom_id", "custom_id contains an API key, and answers repeat it", "custom_id")
    if line.get("method") != "POST":
        return wrong("invalid_method", "method must be POST", "method")
    if line.get("url") != endpoint:
        return wrong("mismatched_endpoint", f"url must be the batch's endpoint {endpoint}", "url")
    body = line.get("body")
    if not isinstance(body, dict):
        return wrong("invalid_request", "body must be an object: the request", "body")
    if body.get("stream"):
        return wrong("invalid_request", "batch answers are not streamed; leave stream out", "body.stream")
    return BatchLine(number, custom_id, body)


def result_line(line: BatchLine, request_id: str, body: bytes) -> LineResult:
    """A line of the output file; `body` is the response's JSON."""
    envelope = _line_result(line, {"status_code": 200, "request_id": request_id, "body": None}, None)
    before, _, after = envelope.line.rpartition('"body": null')
    text = _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], body.decode())  # such characters are in strings
    return envelope._replace(line=f'{before}"body": {text}{after}')


def error_line(line: BatchLine, request_id: str, error: Exception) -> LineResult:
    """A line of the error file."""
    answer = error_reply(error)
    return _line_result(line, {"status_code": answer.status, "request_id": request_id, "body": answer.body}, None)


def unfinished_line(line: BatchLine, reason: tuple[str, str]) -> LineResult:
    """A line of the error file for a request that did not run; `reason` is a code and a message."""
    return _line_result(line, None, {"code": reason[0], "message": reason[1]})


def _line_result(line: BatchLine, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> LineResult:
    item_id = f"batch_req_{secrets.token_hex(12)}"
    content = {"id": item_id, "custom_id": line.custom_id, "response": response, "error": error}
    is_error = error is not None or (response is not None and response["status_code"] != 200)
    return LineResult(line.number, is_error, json.dumps(content))  # ASCII: as many bytes as characters
