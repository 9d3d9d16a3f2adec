"""How `make test` shares the tests among workers (pytest-xdist) that run side by side.

In: the collected tests. Out: the group of every file, which one worker runs from its first test to its last, and the
order in which groups are begun. Nothing here decides what a test sees but which tests ran before it in its process.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

from tests.durations import Durations

#: As xdist counts them; 1 where pytest runs alone.
NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

_TESTS = Path(__file__).parent

#: Ray clusters run one at a time: each wants what the machine has, and a test of one may kill processes.
CLUSTERS = "e2e"
#: Files that compare with the demo model in transformers: it is loaded once, in 15 s.
DEMO_MODEL = "demo model"
#: Folders that need none of the CPU's kernels: the clusters compile those meanwhile.
_FIRST = ("deployments", "cli", "load_tests", "simulation", "examples")


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a group of files to a worker, whole. xdist's own groups are suffixes of names, which pytest 9.2 ignores."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(_TESTS.parent / nodeid.partition("::")[0])

    def schedule(self) -> None:
        """Start, or give tests to a worker that replaces one that crashed.

        A worker runs a test when it has the next one or is told that there is none. xdist 3.8 gives a new worker one
        group and says nothing more; if one test of it or none is left to run, the run never ends.
        """
        super().schedule()
        for node in self.nodes:
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
                self._reschedule(node)


@cache
def group_of(file: Path) -> str:
    """The group of a file: its own path in tests/, or one that is shared with other files."""
    name = file.relative_to(_TESTS).as_posix()
    if name.startswith("e2e/"):
        return CLUSTERS
    return DEMO_MODEL if "demo_transformers" in file.read_text(encoding="utf-8") else name


def turn_of(group_of_test: Mapping[str, str], durations: Durations) -> dict[str, tuple[int, float, str]]:
    """The place of each group in the order of beginning: clusters, those of `_FIRST`, others; the longest in front."""
    seconds: dict[str, float] = defaultdict(float)
    for test, expected_s in durations.of_tests(group_of_test).items():
        seconds[group_of_test[test]] += expected_s
    return {group: (_tier(group), -total_s, group) for group, total_s in seconds.items()}


def _tier(group: str) -> int:
    if group == CLUSTERS:
        return 0
    return 1 if group.partition("/")[0] in _FIRST else 2
