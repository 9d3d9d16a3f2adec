"""The answer to Serve's health checks, held back while the replica is healthy.

Serve's controller learns that a process has died from a call that fails. A held call fails at once, and the controller
sees it at its next turn; calls that are answered at once would find it up to a period later. It also asks less often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.deployments.rpc.background_tasks import wait_for_event

#: The period of health checks for Serve, which counts from the start of a check: the next one follows a held one.
HEALTH_CHECK_PERIOD_S = 0.5
#: How long an answer is held back. A restarted controller may wait for one, before it publishes anything.
HOLD_S = 4.0


class HealthCheck:
    """One replica's; `check` raises if it must be replaced."""

    def __init__(self, check: Callable[[], None], hold_s: float = HOLD_S) -> None:
        self._check = check
        self._hold_s = hold_s
        self._failed = asyncio.Event()
        self._is_first, self._is_holding = True, False

    def fail(self) -> None:
        """End a held call: `check` raises from now on."""
        self._failed.set()

    async def answer(self) -> None:
        """Return or raise as `check` does, after `hold_s` or `fail`.

        The first call is answered at once, because the replica's start waits for it, and so is a call beside a held
        one, which a lost controller has left.
        """
        self._check()
        if not self._is_first and not self._is_holding:
            self._is_holding = True
            try:
                await wait_for_event(self._failed, self._hold_s)
            finally:
                self._is_holding = False
            self._check()
        self._is_first = False
