"""Questions about usage, as OpenAI's admin API asks them: buckets of time, filters, groups, pages.

In: query parameters, already read. Out: a `UsageQuery`, whose buckets begin at whole minutes, hours or days (UTC). A
page is so many buckets; the next one begins where it ends. Nothing is summed here (`ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.deployments.tenancy.usage.flusher import RouteKind, UsageRecord
from app.engine.errors import InvalidRequest
from app.engine.wire_format import message

#: Columns of the ledger that usage is grouped by, by the names that clients use.
GROUPS: Mapping[str, str] = {"project_id": "project_id", "api_key_id": "key_id", "model": "model"}
#: Groups that are asked for and mean nothing here: there are no users, batches or tiers.
EMPTY_GROUPS = frozenset({"user_id", "batch", "service_tier", "api_source", "line_item"})


class BucketSize(NamedTuple):
    """How long a bucket is, and how many a page has: by default and at most."""

    seconds: int
    default_limit: int
    max_limit: int


WIDTHS: Mapping[str, BucketSize] = {
    "1m": BucketSize(60, 60, 1440),
    "1h": BucketSize(3600, 24, 168),
    "1d": BucketSize(86_400, 7, 31),
}


@message
class UsageBucket(NamedTuple):
    """Usage between two times (Unix seconds): a sum for each group of which there is any."""

    start_s: int
    end_s: int
    results: tuple[tuple[Mapping[str, str], UsageRecord], ...]


@message
@dataclass(frozen=True, slots=True)
class UsageQuery:
    """`start_s` to `end_s` are whole buckets of one page; `next_s` is where the next page begins, None after the last.

    `only`: columns of the ledger and the values that count. `group_by`: columns. `route_kind` None: of every route.
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
    width: BucketSize,
    limit: int | None,
    page: str | None,
    only: Mapping[str, Sequence[str]],
    group_by: Sequence[str],
    route_kind: RouteKind | None,
) -> UsageQuery:
    """Raises InvalidRequest. `page` is the `next_page` of the page before."""
    if end_s <= start_s:
        raise InvalidRequest(f"end_time {end_s} is not after start_time {start_s}", param="end_time")
    limit = width.default_limit if limit is None else limit
    if not 1 <= limit <= width.max_limit:
        raise InvalidRequest(f"limit is {limit}; it is from 1 to {width.max_limit}", param="limit")
    for name in group_by:
        if name not in GROUPS and name not in EMPTY_GROUPS:
            known = ", ".join(sorted([*GROUPS, *EMPTY_GROUPS]))
            raise InvalidRequest(f"group_by has {name[:40]!r}; it may have {known}", param="group_by")
    first = start_s if page is None else _page_start(page)
    first -= first % width.seconds
    end = -(-end_s // width.seconds) * width.seconds
    last = min(end, first + limit * width.seconds)
    columns = tuple(GROUPS[name] for name in group_by if name in GROUPS)
    return UsageQuery(first, last, last if last < end else None, width.seconds, route_kind, only, columns)


def next_page(query: UsageQuery) -> str | None:
    return None if query.next_s is None else f"page_{query.next_s}"


def _page_start(page: str) -> int:
    number = page.removeprefix("page_")
    if not (page.startswith("page_") and number.isascii() and number.isdigit() and len(number) < 12):
        raise InvalidRequest(f"page is {page[:40]!r}; it is the next_page of the page before", param="page")
    return int(number)
