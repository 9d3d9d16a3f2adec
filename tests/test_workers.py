"""What workers of a test run are given when one of them crashes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from tests.workers import GroupScheduling

TESTS = ["tests/test_main.py::a", "tests/test_config.py::b", "tests/test_docs.py::c", "tests/test_imports.py::d"]


class FakeWorker:
    """As xdist's: it runs a test when it knows the next one, or that none follows."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def run_next(self) -> int | None:
        if len(self.given) > 1 or (self.given and self.shutting_down):
            return self.given.pop(0)
        return None


def test_a_worker_that_replaces_a_crashed_one_runs_the_last_test(pytestconfig: pytest.Config) -> None:
    of_two_workers = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=False), getvalue=lambda _: ["popen"] * 2, hook=pytestconfig.hook
    )
    scheduling = GroupScheduling(cast(pytest.Config, of_two_workers), log=None)
    workers = [FakeWorker("gw0"), FakeWorker("gw1")]
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, TESTS)
    scheduling.schedule()
    first, crashed = workers
    while (index := first.run_next()) is not None:
        scheduling.mark_test_complete(first, index)
    assert crashed.given
    while len(crashed.given) > 1:
        index = crashed.run_next()
        assert index is not None
        scheduling.mark_test_complete(crashed, index)
    scheduling.remove_node(crashed)
    replacement = FakeWorker("gw2")
    scheduling.add_node(replacement)
    scheduling.add_node_collection(replacement, TESTS)
    scheduling.schedule()
    for worker in (first, replacement):
        while (index := worker.run_next()) is not None:
            scheduling.mark_test_complete(worker, index)
    assert not scheduling.has_pending
