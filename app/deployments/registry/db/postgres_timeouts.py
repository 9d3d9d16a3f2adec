"""Client-side timeouts for PostgreSQL connections.

The server's own timeouts do not help when the server hangs (a stopped process, a stuck disk, no memory): its kernel
still acknowledges bytes, so the connection looks alive. After a timeout the connection is closed, because it is unknown
what the server did.
"""

from __future__ import annotations

import math
import time
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from sqlalchemy import Engine, event

T = TypeVar("T")


class TimedConnection(psycopg.Connection[tuple[Any, ...]]):
    """Waits for at most `timeout_s` at a time."""

    timeout_s = math.inf

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """Raises OperationalError, and closes the connection, when a statement takes longer than `timeout_s`."""
        began_s = time.monotonic()
        try:
            return super().wait(gen, interval, self.timeout_s if timeout is None else timeout)
        except psycopg.OperationalError:
            if time.monotonic() - began_s >= self.timeout_s:
                self.close()
                raise psycopg.OperationalError(f"the server has not answered for {self.timeout_s:g} s") from None
            raise


class PostgresTimeouts:
    """Sets how long connections wait: `busy_s` in transactions, `idle_s` for the test before use."""

    def __init__(self, engine: Engine, *, idle_s: float, busy_s: float) -> None:
        self.idle_s, self.busy_s = idle_s, busy_s
        event.listen(engine, "do_connect", self._connect)
        event.listen(engine, "checkout", self._begin)
        event.listen(engine, "checkin", self._end)

    def _connect(self, _: object, __: object, args: list[Any], options: dict[str, Any]) -> TimedConnection:
        connection = TimedConnection.connect(*args, **options)
        connection.timeout_s = self.idle_s
        return connection

    def _begin(self, connection: TimedConnection, _: object, __: object) -> None:
        connection.timeout_s = self.busy_s

    def _end(self, connection: TimedConnection | None, _: object) -> None:
        if connection is not None:  # the connection was not lost
            connection.timeout_s = self.idle_s
