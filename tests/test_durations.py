"""Which tests are too slow, what a run is expected to take, and how nightly tests are shared among days."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.durations import FILE, MAX_E2E_S, MAX_S, MIN_LISTED, Durations
from tests.nightly import parsed_share, shares

LISTED = {f"tests/a.py::t{index}": 1.0 + index % 3 for index in range(MIN_LISTED)}


def too_slow(found: dict[str, float], e2e: tuple[str, ...] = (), listed: dict[str, float] = LISTED) -> dict[str, float]:
    """On a machine where no thread waits for a core."""
    return Durations(listed).too_slow(found, found, e2e)


def test_a_new_test_of_twenty_seconds_is_too_slow() -> None:
    assert too_slow({**LISTED, "tests/b.py::new": 20.0}) == {"tests/b.py::new": 15.0}
    assert too_slow({**LISTED, "tests/b.py::new": 9.0}) == {}


def test_a_test_end_to_end_may_take_a_minute() -> None:
    found = {**LISTED, "tests/e2e/b.py::new": 80.0, "tests/e2e/b.py::longer": 100.0}
    e2e = ("tests/e2e/b.py::new", "tests/e2e/b.py::longer")
    assert too_slow(found, e2e) == {"tests/e2e/b.py::longer": 90.0}


def test_a_machine_that_is_slower_may_take_longer() -> None:
    slow = {name: 3 * seconds for name, seconds in LISTED.items()}
    assert too_slow({**slow, "tests/b.py::new": 40.0}) == {}
    assert too_slow({**slow, "tests/b.py::new": 60.0}) == {"tests/b.py::new": 45.0}


def test_a_listed_test_may_have_a_bad_day_and_must_not_become_slow() -> None:
    listed = LISTED | {"tests/b.py::listed": 9.0}
    assert too_slow({**LISTED, "tests/b.py::listed": 25.0}, listed=listed) == {}
    assert too_slow({**LISTED, "tests/b.py::listed": 28.0}, listed=listed) == {"tests/b.py::listed": 27.0}


def test_what_a_test_waits_for_a_core_does_not_count_and_its_processes_may_wait_as_well() -> None:
    wall = {name: 4 * seconds for name, seconds in LISTED.items()}
    name = "tests/b.py::new"
    assert Durations(LISTED).too_slow({**LISTED, name: 50.0}, {**wall, name: 50.0}) == {}
    assert Durations(LISTED).too_slow({**LISTED, name: 5.0}, {**LISTED, name: 50.0}) == {}


def test_a_faster_machine_gives_nobody_less_time() -> None:
    fast = {name: seconds / 4 for name, seconds in LISTED.items()}
    assert too_slow({**fast, "tests/b.py::new": 14.0}) == {}


def test_a_few_tests_do_not_tell_how_fast_the_machine_is() -> None:
    few = dict(list(LISTED.items())[: MIN_LISTED - 1])
    assert too_slow({**few, "tests/b.py::new": 60.0}) == {}


def test_tests_that_are_not_listed_share_what_their_file_takes() -> None:
    durations = Durations({"tests/a.py::slow": 5.0}, {"tests/a.py": 3.0})
    expected = durations.of_tests(["tests/a.py::slow", "tests/a.py::x", "tests/a.py::y"])
    assert expected == {"tests/a.py::slow": 5.0, "tests/a.py::x": 1.5, "tests/a.py::y": 1.5}


def test_what_a_run_measures_is_written_and_what_it_left_out_is_kept(tmp_path: Path) -> None:
    here, gone = "tests/test_durations.py", "tests/test_that_is_gone.py"
    before = Durations({f"{here}::left_out": 2.0, f"{here}::now_fast": 3.0, f"{gone}::x": 4.0}, {here: 1.0, gone: 1.0})
    after = before.updated({f"{here}::now_fast": 0.5, f"{here}::slow": 6.0}, {here: 8.0}, with_files=True)
    assert after == Durations({f"{here}::left_out": 2.0, f"{here}::slow": 6.0}, {here: 2.0})
    assert before.updated({}, {here: 8.0}, with_files=False).files == {here: 1.0}
    after.write(tmp_path / "durations.json")
    assert Durations.read(tmp_path / "durations.json") == after


def test_shares_are_disjoint_whole_and_about_as_long() -> None:
    tests = [f"tests/{name}.py::t{index}" for name in "abcdefg" for index in range(3)]
    durations = Durations({test: 10.0 for test in tests if "/a." in test}, dict.fromkeys(tests, 0.0))
    found = shares(tests, 3, durations)
    assert found.keys() == {f"tests/{name}.py" for name in "abcdefg"}
    assert Counter(found.values())[found["tests/a.py"]] == 1, "the long one is alone"
    assert found == shares(tests[::-1], 3, durations)


@pytest.mark.parametrize("text", ["3/3", "x/3", "1", "-1/3", ""])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    assert parsed_share("2/3") == (2, 3)
    with pytest.raises(pytest.UsageError, match="it is I/N"):
        parsed_share(text)


def test_no_test_of_every_commit_is_listed_as_slower_than_it_may_be(request: pytest.FixtureRequest) -> None:
    listed = json.loads(FILE.read_text())["tests"]
    limits = {
        item.nodeid: MAX_E2E_S if item.get_closest_marker("e2e") else MAX_S
        for item in request.session.items
        if item.get_closest_marker("nightly") is None
    }
    assert {name: seconds for name, seconds in listed.items() if seconds > limits.get(name, seconds)} == {}
