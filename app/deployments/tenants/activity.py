"""What is seen of an adapter's requests: how many, how many failed, their tokens, and how long first tokens took.

In: requests as they end. Out: amounts that can be added up, over requests and over processes, and quantiles of the time
to first token. Rule: times are counted in buckets whose bounds grow by the square root of two, so that adding loses
nothing, and a quantile is within a fifth of the true one between `SHORTEST_S` and an hour.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from app.engine.message import message

#: What is shorter is in the first bucket.
SHORTEST_S = 0.001
_LAST_BUCKET = 44  # an hour and more


@message
class ActivityKey(NamedTuple):
    """Whose requests, and for which adapter: it is `owner_id`'s, who need not be `tenant_id`, who asked."""

    tenant_id: str
    owner_id: str
    name: str
    digest: str


@message
class Activity(NamedTuple):
    """Amounts. `first_token_s` is the sum of times, `first_tokens` how many were in which bucket, by bucket."""

    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    first_tokens: tuple[tuple[int, int], ...] = ()

    def plus(self, other: Activity) -> Activity:
        counts = Counter(dict(self.first_tokens))
        counts.update(dict(other.first_tokens))
        return Activity(
            self.num_requests + other.num_requests,
            self.num_errors + other.num_errors,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.first_token_s + other.first_token_s,
            tuple(sorted(counts.items())),
        )

    @property
    def num_first_tokens(self) -> int:
        """Requests whose time to first token is known."""
        return sum(count for _, count in self.first_tokens)

    def first_token_quantile_s(self, part: float) -> float:
        """The time within which that part of the first tokens came, 0 < part <= 1. Raises ValueError where none did."""
        left = math.ceil(part * self.num_first_tokens)
        for bucket, count in self.first_tokens:
            left -= count
            if left <= 0:
                return SHORTEST_S * 2 ** ((bucket - 0.5) / 2)  # its middle
        raise ValueError("no first token was seen")


@message
class Seen(NamedTuple):
    """What is known of an adapter since some time (Unix seconds). `num_loads`: by the tier it was brought up from; what
    is brought to a device is a load of "device"."""

    since_s: float
    activity: Activity
    num_loads: Mapping[str, int]


def first_token(seconds: float) -> Activity:
    """One request's time to first token, and nothing else of it."""
    bucket = math.ceil(2 * math.log2(max(seconds, SHORTEST_S) / SHORTEST_S))
    return Activity(first_token_s=seconds, first_tokens=((min(bucket, _LAST_BUCKET), 1),))
