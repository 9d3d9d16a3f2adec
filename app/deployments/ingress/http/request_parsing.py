"""Reading what clients send: bodies with a limit, strict JSON, pages.

In: a request. Out: a decoded value, or an error that says what is wrong with it. Which fields a body may
have is left to the schemas.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Request
from starlette.requests import ClientDisconnect

from app.deployments.ingress.status import BodyTooLarge, ClientGone, InvalidJson, UnknownEncoding
from app.engine.errors import InvalidRequest

#: Entries of a page: unless the client says how many, and at most.
MAX_PAGE = 1000


class PageQuery(NamedTuple):
    """`?limit=&after=`, as OpenAI's lists have them: `after` is the id of the last entry that is known."""

    limit: int
    after: str | None


def page_query(request: Request) -> PageQuery:
    """Raises InvalidRequest."""
    return PageQuery(int_query(request, "limit", MAX_PAGE), request.query_params.get("after"))


def int_query(request: Request, name: str, default: int, highest: int = MAX_PAGE) -> int:
    """A whole number from 1 to `highest`. Raises InvalidRequest."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16 and 1 <= int(text) <= highest):
        raise InvalidRequest(f"{name} is {text[:40]!r}; it is a whole number from 1 to {highest}", param=name)
    return int(text)


def list_query(request: Request, name: str) -> list[str]:
    """A list as OpenAI's client writes it, name[]=a&name[]=b, or without the brackets."""
    return request.query_params.getlist(f"{name}[]") + request.query_params.getlist(name)


def page_body(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A list in OpenAI's shape; `last_id` is what the next page comes after."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


async def read_bytes(request: Request, max_bytes: int, limit: str = "limits.max_body_bytes") -> bytes:
    """The body. Raises UnknownEncoding, BodyTooLarge once the limit is passed, ClientGone."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise UnknownEncoding(f"the body's Content-Encoding is {encoding[:40]!r}; send it without")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise BodyTooLarge(f"the body is longer than {limit} {max_bytes}")
    except ClientDisconnect:
        raise ClientGone(f"the client went away after {len(body)} bytes of its request") from None
    return bytes(body)


async def read_json(request: Request, max_bytes: int) -> object:
    """The body, decoded. Raises what `read_bytes` does, and InvalidJson."""
    body = await read_bytes(request, max_bytes)
    if not body:
        raise InvalidJson("the body is empty; send a JSON object")
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise InvalidJson(f"the body is not JSON: {str(error)[:200] or type(error).__name__}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return values
