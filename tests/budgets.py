"""How much a test that could go on for ever does: a little in `make test`, twenty times as much in `make test-nightly`.

In: what is enough before every commit. Out: what this run shall do. `--long` sets the factor before tests are imported.
"""

from __future__ import annotations

import os
import time

#: Set by `--long`, for the workers as well.
VARIABLE = "POLYLORA_TEST_FACTOR"
LONG_FACTOR = 20


def factor() -> int:
    return int(os.environ.get(VARIABLE, "1"))


def examples(count: int) -> int:
    """Examples of a property test, or damaged files."""
    return count * factor()


class Budget:
    """Seconds for rounds of a fuzz test; `--seed` repeats the rounds in their order."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds * factor()

    def is_left(self) -> bool:
        return time.monotonic() < self._end_s
