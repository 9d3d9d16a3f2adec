"""An event loop whose clock jumps: minutes of waiting take as long as the code itself.

The coroutine may wait for nothing outside of its loop (no threads, no sockets). When nothing is ready the clock goes to
the next timer at once, so the order of events is that of their times, on any machine.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Instead of waiting it moves the clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing will happen"
            self.now_s += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and cancel the remaining tasks."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
