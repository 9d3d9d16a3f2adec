"""Exponential backoff: what failed a moment ago is not tried again yet.

A key that failed raises AdapterQuarantined with the reason and the time left. The time doubles with each failure in a
row, up to a limit; `clear` ends it. So a broken adapter or a source that is down costs one attempt now and then,
however many requests need it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.deployments.registry.feed.view import Key
from app.engine.errors import AdapterQuarantined, AdapterUnreadable, PolyloraError, ServerOverloaded

FIRST_S = 5.0
LONGEST_S = 600.0
MAX_KEYS = 8192


@dataclass(frozen=True, slots=True)
class Failure:
    """The number of failures in a row, the last one's reason, and when the key may be tried again (on the backoff's
    clock).
    """

    reason: str
    num_failures: int
    until_s: float


class FailureBackoff:
    """Used on one event loop; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, Failure] = OrderedDict()

    def get(self, key: str) -> Failure | None:
        return self._failures.get(key)

    def left_s(self, key: str) -> float:
        """Seconds until `key` may be tried again; 0 if it may."""
        failure = self._failures.get(key)
        return 0.0 if failure is None else max(failure.until_s - self._clock(), 0.0)

    def check(self, key: str, what: str) -> None:
        """Raises AdapterQuarantined if `key` must not be tried yet; `what` names it in the message."""
        failure, left_s = self._failures.get(key), self.left_s(key)
        if failure is not None and left_s > 0:
            times = "" if failure.num_failures == 1 else f" ({failure.num_failures} times in a row)"
            raise AdapterQuarantined(
                f"{what} failed to load{times}: {failure.reason}; it is tried again in {math.ceil(left_s)} s, "
                "or at once when it is registered again",
                retry_after_s=left_s,
            )

    def record_failure(self, key: str, reason: str) -> Failure:
        before = self._failures.pop(key, None)
        number = 1 if before is None else before.num_failures + 1
        wait_s = min(FIRST_S * 2.0 ** min(number - 1, 30), LONGEST_S)
        self._failures[key] = Failure(reason, number, self._clock() + wait_s)
        while len(self._failures) > MAX_KEYS:
            self._failures.popitem(last=False)
        return self._failures[key]

    def clear(self, key: str) -> None:
        self._failures.pop(key, None)

    @contextmanager
    def recorded_outcome(self, key: str) -> Iterator[None]:
        """An attempt at an adapter, whose outcome is recorded: a failure of the adapter, or a success."""
        try:
            yield
        except (ServerOverloaded, AdapterQuarantined):  # nothing is wrong with the adapter
            raise
        except Exception as error:
            self.record_failure(key, failure_reason(error))
            raise
        self.clear(key)


def failure_key(name: Key) -> str:
    """The key of a tenant's adapter name."""
    return "/".join(name)


def failure_reason(error: Exception) -> str:
    """The message of an expected error; the class of any other."""
    if isinstance(error, PolyloraError):
        return str(error)
    return f"internal error ({type(error).__name__})"


def unreadable_error(name: str, error: Exception) -> AdapterUnreadable:
    """What a client gets for `error`: without any place of this server, and with the time until the next attempt."""
    wait_s = error.retry_after_s if isinstance(error, AdapterQuarantined) else FIRST_S
    return AdapterUnreadable(
        f"adapter {name!r} is registered but cannot be read at the moment; it is tried again in {math.ceil(wait_s)} s, "
        f"and GET /v1/loras/{name} gives its owner the cause",
        retry_after_s=wait_s,
    )
