"""Which tests run by night, in which third of the nights, and until when.

`make test` leaves out what is marked `nightly`. `make test-nightly` (`--nightly`) runs just that, and the property and
fuzz tests twenty times as long. `.ci/run` runs a third of them (`--share I/3`), another each
day, and begins none that would end after its time is up (`--stop-after MINUTES`).
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.durations import Durations, file_of

#: When the run stops beginning tests, seconds since the epoch: for the workers as well.
END_VARIABLE = "POLYLORA_TESTS_END"
#: Begins the reason for which a test was skipped that was not reached.
NOT_REACHED = "not reached"
#: What a test may take that the file of durations does not list, times what it lists of the others.
UNLISTED_S, MARGIN = 30.0, 1.5

#: The variable that names the interpreter of an environment with vLLM, for tests marked `vllm`.
VLLM_PYTHON = "POLYLORA_VLLM_PYTHON"


def has_vllm() -> bool:
    return bool(os.environ.get(VLLM_PYTHON))


def mark_folder(items: Iterable[pytest.Item], conftest: str, *marks: pytest.MarkDecorator) -> None:
    """Mark all tests of the folder whose conftest.py this is, and of those below it."""
    for item in items:
        if Path(conftest).parent in item.path.parents:
            for mark in marks:
                item.add_marker(mark)


def is_nightly(item: pytest.Item) -> bool:
    return item.get_closest_marker("nightly") is not None


@cache
def goes_on_longer(file: Path) -> bool:
    """Whether tests of a file do more with `--long` (tests/budgets.py)."""
    return re.search(r"^from tests(\.| import )budgets\b", file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def shares(tests: Iterable[str], num_shares: int, durations: Durations) -> dict[str, int]:
    """The share of each file, so that shares take about as long: the longest first, each to the smallest share."""
    seconds: dict[str, float] = defaultdict(float)
    for test, expected_s in durations.of_tests(tests).items():
        seconds[file_of(test)] += expected_s
    filled = [0.0] * num_shares
    found = {}
    for file in sorted(seconds, key=lambda name: (-seconds[name], name)):
        found[file] = filled.index(min(filled))
        filled[found[file]] += seconds[file]
    return found


def parsed_share(text: str) -> tuple[int, int]:
    """ "2/3" is (2, 3); 0/3, 1/3 and 2/3 together are everything."""
    share, _, number = text.partition("/")
    if not (share.isdigit() and number.isdigit() and int(share) < int(number)):
        raise pytest.UsageError(f"--share {text}: it is I/N with I from 0 to N-1")
    return int(share), int(number)


def stop_after(minutes: float) -> None:
    os.environ[END_VARIABLE] = str(time.time() + 60 * minutes)


def skip_what_ends_too_late(item: pytest.Item, durations: Durations) -> None:
    """Skip a test that would not have ended when the run is to stop."""
    end_s = os.environ.get(END_VARIABLE)
    if end_s and time.time() + MARGIN * durations.tests.get(item.nodeid, UNLISTED_S / MARGIN) > float(end_s):
        pytest.skip(f"{NOT_REACHED} in time")
