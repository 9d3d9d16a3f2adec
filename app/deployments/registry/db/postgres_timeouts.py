"""Connections to PostgreSQL that end by themselves when the server says nothing.

In: an engine of SQLAlchemy, and seconds. Out: every wait for the server's next word is bounded on our side of the
connection, too. The limits that the server is given do not help where the server itself stands still (a stopped
process, a disk that hangs, a machine without memory): its kernel goes on to acknowledge bytes, so that the connection
looks alive. Rule: a connection that has waited in vain is closed, for nobody knows what the server did.
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
        """Raises OperationalError when a statement has not ended after that long; then the connection is closed."""
        began_s = time.monotonic()
        try:
            return super().wait(gen, interval, self.timeout_s if timeout is None else timeout)
        except psycopg.OperationalError:
            if time.monotonic() - began_s >= self.timeout_s:
                self.close()
                raise psycopg.OperationalError(f"the server has said nothing for {self.timeout_s:g} s") from None
            raise


class PostgresTimeouts:
    """How long connections wait: `busy_s` in transactions, `idle_s` when they are tried before their use."""

    def __init__(self, engine: Engine, *, idle_s: float, busy_s: float) -> None:
        self.idle_s, self.busy_s = idle_s, busy_s
        event.listen(engine, "do_connect", self._connect)
        event.listen(engine, "checkout", self._begin)
        event.listen(engine, "checkin", self._end)

    def _connect(self, _: object, __: object, words: list[Any], options: dict[str, Any]) -> TimedConnection:
        connection = TimedConnection.connect(*words, **options)
        connection.timeout_s = self.idle_s
        return connection

    def _begin(self, connection: TimedConnection, _: object, __: object) -> None:
        connection.timeout_s = self.busy_s

    def _end(self, connection: TimedConnection | None, _: object) -> None:
        if connection is not None:  # it was not lost meanwhile
            connection.timeout_s = self.idle_s
