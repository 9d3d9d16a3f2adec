"""How long tests take: `.ci/durations.json`, which is committed, and what a run does with it.

- Groups of files are balanced over the workers by it (`tests/workers.py`), nightly tests over the days.
- A run says at its start how long it will take, and every half minute how far it is.
- A whole run fails where a test takes more than `MAX_S` (end to end: `MAX_E2E_S`) and is not marked `nightly`.
- `pytest --write-durations` writes the file again, from the tests that it ran.

A test takes its call and what is set up for it alone. What tests share (a cluster, a loaded model) and what Numba
compiles for the first time is the file's, and has no limit. Against the limit counts what is left without the time in
which the test's thread could run and had no core (`own_s`); processes that a test starts wait for cores, too, so that
the limit grows with what listed tests take longer than the file says.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from app.kernels.machine.jit import compile_seconds

FILE = Path(__file__).parent.parent / ".ci" / "durations.json"
#: A test that takes less is in its file's sum only.
LISTED_S = 1.0
#: What any test takes at least.
LEAST_S = 0.01
#: What a test may take that is not nightly, on a machine as fast as the one that wrote the file.
MAX_S, MAX_E2E_S = 10.0, 60.0
#: Other work on the machine may come and go while one test runs: so much more is let pass, of the limit and of what
#: the file says of a test.
TOLERANCE_OF_MAX, TOLERANCE_OF_LISTED = 1.5, 3.0
#: Fewer listed tests do not tell how fast the machine is: then no test is too slow.
MIN_LISTED = 20
#: Progress is shown so often.
PROGRESS_S = 30.0


@dataclass(frozen=True)
class Durations:
    """Seconds by the test's id, for those of `LISTED_S` and more, and of all that a file takes beside them."""

    tests: dict[str, float] = field(default_factory=dict)
    files: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = FILE) -> Durations:
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()

    def write(self, path: Path = FILE) -> None:
        document = {
            "files": {name: round(seconds, 1) for name, seconds in sorted(self.files.items())},
            "tests": {name: round(seconds, 1) for name, seconds in sorted(self.tests.items())},
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def of_tests(self, ids: Iterable[str]) -> dict[str, float]:
        """What each test is expected to take; tests that are not listed have equal parts of their file's sum."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in ids:
            by_file[file_of(test)].append(test)
        expected = {}
        for file, tests in by_file.items():
            unlisted = [test for test in tests if test not in self.tests]
            each = max(self.files.get(file, 0.0) / max(len(unlisted), 1), LEAST_S)
            expected.update({test: self.tests.get(test, each) for test in tests})
        return expected

    def updated(self, wall_s: dict[str, float], all_s: dict[str, float], *, with_files: bool) -> Durations:
        """With what a run measured, of each test and of each file. Tests that are gone are left out."""
        measured = {name: seconds for name, seconds in wall_s.items() if seconds >= LISTED_S}
        kept = {
            name: s
            for name, s in self.tests.items()
            if name not in wall_s and (FILE.parent.parent / file_of(name)).exists()
        }
        files = {name: s for name, s in self.files.items() if (FILE.parent.parent / name).exists()}
        if with_files:
            listed: dict[str, float] = defaultdict(float)
            for name, seconds in measured.items():
                listed[file_of(name)] += seconds
            files |= {name: max(seconds - listed[name], 0.0) for name, seconds in all_s.items()}
        return Durations(kept | measured, files)

    def too_slow(
        self, own_s: dict[str, float], wall_s: dict[str, float], e2e: Collection[str] = ()
    ) -> dict[str, float]:
        """Tests (not nightly) that took too long, and what they might have taken, as fast as this machine is now.

        `e2e` names those that run end to end.
        """
        ratios = [wall_s[name] / seconds for name, seconds in self.tests.items() if name in wall_s]
        if len(ratios) < MIN_LISTED:
            return {}
        slowness = max(median(ratios), 1.0)
        allowed = {}
        for name in own_s:
            limit_s = TOLERANCE_OF_MAX * (MAX_E2E_S if name in e2e else MAX_S)
            allowed[name] = slowness * max(limit_s, TOLERANCE_OF_LISTED * self.tests.get(name, 0.0))
        return {name: allowed[name] for name, seconds in own_s.items() if seconds > allowed[name]}


def file_of(test: str) -> str:
    return test.partition("::")[0]


class OwnTime:
    """In the process that runs tests: writes what a test took into its reports.

    `own_s` and `wall_s` without and with the time for which it waited for a core, `all_s` with what tests share.
    """

    def __init__(self) -> None:
        self._depth = 0  # of shared fixtures that are set up for one another
        self._begin_phase()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._begin_phase()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        is_shared = fixturedef.scope != "function"
        began_s, compiled_s, waited_s = time.perf_counter(), compile_seconds(), _waited_s()
        self._depth += is_shared
        try:
            return (yield)
        finally:
            self._depth -= is_shared
            if is_shared and not self._depth:
                self._shared_s += time.perf_counter() - began_s - (compile_seconds() - compiled_s)
                self._shared_waited_s += _waited_s() - waited_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.all_s = max(report.duration - (compile_seconds() - self._compiled_s), 0.0)
        report.wall_s = max(report.all_s - self._shared_s, 0.0) if report.when != "teardown" else 0.0
        report.own_s = max(report.wall_s - (_waited_s() - self._waited_s - self._shared_waited_s), 0.0)
        self._begin_phase()
        return report

    def _begin_phase(self) -> None:
        self._shared_s, self._shared_waited_s = 0.0, 0.0
        self._compiled_s, self._waited_s = compile_seconds(), _waited_s()


def _waited_s() -> float:
    """How long this thread could have run and had no core until now, where the system (Linux) says so."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class Run:
    """In the process that reports: expectations before, progress meanwhile, and what was too slow at the end."""

    def __init__(
        self, config: pytest.Config, durations: Durations, num_workers: int, group_of: Callable[[str], str]
    ) -> None:
        self._config, self._durations, self._num_workers, self._group_of = config, durations, num_workers, group_of
        self._expected: dict[str, float] = {}
        self._left: dict[str, float] = defaultdict(float)  # of each group
        self._done_s = 0.0
        self._began_s = self._shown_s = time.monotonic()
        self._own_s: dict[str, float] = defaultdict(float)
        self._wall_s: dict[str, float] = defaultdict(float)
        self._all_s: dict[str, float] = defaultdict(float)
        self._nightly: set[str] = set()
        self._e2e: set[str] = set()
        self._too_slow: dict[str, float] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._start([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._start(ids)

    def _start(self, ids: Sequence[str]) -> None:
        if self._expected or not ids:
            return
        self._expected = self._durations.of_tests(ids)
        for test, seconds in self._expected.items():
            self._left[self._group_of(file_of(test))] += seconds
        self._began_s = self._shown_s = time.monotonic()
        if sum(self._left.values()) > 2 * PROGRESS_S and not self._config.option.collectonly:
            self._write(f"{len(ids)} tests, expected to take {_minutes(self._left_s())}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._own_s[test] += getattr(report, "own_s", 0.0)
        self._wall_s[test] += getattr(report, "wall_s", 0.0)
        self._all_s[file_of(test)] += getattr(report, "all_s", 0.0)
        if "nightly" in report.keywords:
            self._nightly.add(test)
        if "e2e" in report.keywords:
            self._e2e.add(test)
        if report.when != "teardown" or test not in self._expected:
            return
        seconds = self._expected[test]
        self._done_s += seconds
        self._left[self._group_of(file_of(test))] -= seconds
        now_s = time.monotonic()
        if now_s - self._shown_s >= PROGRESS_S:
            self._shown_s = now_s
            took_s = now_s - self._began_s
            share = self._done_s / sum(self._expected.values())
            pace = took_s * self._num_workers / max(self._done_s, 1.0)
            self._write(f"{share:.0%} in {_minutes(took_s)}, about {_minutes(self._left_s() * max(pace, 0.3))} left")

    def _left_s(self) -> float:
        """One worker runs a group, all of them everything."""
        left = self._left.values()
        return max(sum(left) / self._num_workers, *left)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._config.getoption("--write-durations"):
            with_files = not self._config.getoption("--long")
            self._durations.updated(self._wall_s, self._all_s, with_files=with_files).write()
            return
        limited = {name: seconds for name, seconds in self._own_s.items() if name not in self._nightly}
        self._too_slow = (
            {} if self._config.getoption("--long") else self._durations.too_slow(limited, self._wall_s, self._e2e)
        )
        if self._too_slow and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._too_slow:
            terminalreporter.section("tests that take too long", red=True)
            for name, allowed_s in self._too_slow.items():
                took = f"{self._own_s[name]:.1f} s of at most {allowed_s:.1f}"
                terminalreporter.write_line(f"{name} took {took}: make it smaller, or mark it nightly")

    def _write(self, line: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            started = self._config.get_terminal_writer().width_of_current_line > 0
            reporter.write_line(f"\n{line}" if started else line)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
