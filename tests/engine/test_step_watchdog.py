"""The age of a step is what looks at it have seen."""

from __future__ import annotations

import pytest

from app.engine.engine_thread import LONGEST_GAP_S, StepWatchdog


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_age_is_the_time_between_looks_at_one_step() -> None:
    time = Time()
    clock = StepWatchdog(time)
    assert clock.age_s() == 0
    clock.begin()
    ages = []
    for _ in range(4):
        ages.append(clock.age_s())
        time.now_s += 1.0
    assert ages == [0, 1, 2, 3]
    clock.end()
    assert clock.age_s() == 0
    clock.begin()
    assert clock.age_s() == 0, "another step"
    time.now_s += 0.5
    assert clock.age_s() == 0.5


def test_time_in_which_the_process_stood_still_is_not_the_steps() -> None:
    time = Time()
    clock = StepWatchdog(time)
    clock.begin()
    clock.age_s()
    time.now_s += 1000
    assert clock.age_s() == LONGEST_GAP_S


def test_the_usual_is_the_median() -> None:
    time = Time()
    clock = StepWatchdog(time)
    assert clock.usual_s == 0
    for lasted_s in (1.0, 100.0, 2.0):
        clock.begin()
        time.now_s += lasted_s
        clock.end()
    assert clock.usual_s == pytest.approx(2.0)
