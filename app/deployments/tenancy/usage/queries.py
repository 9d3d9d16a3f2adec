"""Usage queries as in OpenAI's admin API: time buckets, filters, groups, pages.

Buckets begin at whole minutes, hours or days (UTC). A page is a number of buckets; the next begins where it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.deployments.tenancy.usage.flusher import RouteKind, UsageRecord
from app.engine.errors import InvalidRequest
from app.engine.wire_format import message

#: Ledger columns to group by, by the names that clients use.
GROUPS: Mapping[str, str] = {"project_id": "project_id", "api_key_id": "key_id", "model": "model"}
#: Groups that are accepted and have no meaning here: there are no users, batches or service tiers in the ledger.
EMPTY_GROUPS = frozenset({"user_id", "batch", "service_tier", "api_source", "line_item"})


class BucketSize(NamedTuple):
    """The length of a bucket, and the default and maximum number of buckets per page."""

    seconds: int
    default_limit: int
    max_limit: int


BUCKET_SIZES: Mapping[str, BucketSize] = {
    "1m": BucketSize(60, 60, 1440),
    "1h": BucketSize(3600, 24, 168),
    "1d": BucketSize(86_400, 7, 31),
}


@message
class UsageBucket(NamedTuple):
    """Usage between two times (Unix seconds): a sum for each group that has any."""

    start_s: int
    end_s: int
    results: tuple[tuple[Mapping[str, str], UsageRecord], ...]


@message
@dataclass(frozen=True, slots=True)
class UsageQuery:
    """`start_s` to `end_s` are whole buckets of one page; `next_s` is where the next page begins, None after the last.

    `only`: ledger columns and the values to include. `group_by`: columns. `route_kind` None: all routes.
    """

    start_s: int
    end_s: int
    next_s: int | None
    width_s: int
    route_kind: RouteKind | None
    only: Mapping[str, Sequence[str]]
    group_by: tuple[str, ...]


def usage_query(
    start_s: int,
    end_s: int,
    bucket_size: BucketSize,
    limit: int | None,
    page: str | None,
    only: Mapping[str, Sequence[str]],
    group_by: Sequence[str],
    route_kind: RouteKind | None,
) -> UsageQuery:
    """A query from request parameters. `page` is the `next_page` of the previous page. Raises InvalidRequest."""
    if end_s <= start_s:
        raise InvalidRequest(f"end_time {end_s} is not after start_time {start_s}", param="end_time")
    limit = bucket_size.default_limit if limit is None else limit
    if not 1 <= limit <= bucket_size.max_limit:
        raise InvalidRequest(f"limit is {limit}; it is from 1 to {bucket_size.max_limit}", param="limit")
    for name in group_by:
        if name not in GROUPS and name not in EMPTY_GROUPS:
            known = ", ".join(sorted([*GROUPS, *EMPTY_GROUPS]))
            raise InvalidRequest(f"group_by has {name[:40]!r}; it may have {known}", param="group_by")
    first = start_s if page is None else _page_start(page)
    first -= first % bucket_size.seconds
    end = -(-end_s // bucket_size.seconds) * bucket_size.seconds
    last = min(end, first + limit * bucket_size.seconds)
    columns = tuple(GROUPS[name] for name in group_by if name in GROUPS)
    return UsageQuery(first, last, last if last < end else None, bucket_size.seconds, route_kind, only, columns)


def next_page(query: UsageQuery) -> str | None:
    return None if query.next_s is None else f"page_{query.next_s}"


def _page_start(page: str) -> int:
    number = page.removeprefix("page_")
    if not (page.startswith("page_") and number.isascii() and number.isdigit() and len(number) < 12):
        raise InvalidRequest(f"page is {page[:40]!r}; it is the next_page of the page before", param="page")
    return int(number)
