"""Quarantine: waits double, end with a success, and are bounded in number."""

from __future__ import annotations

import pickle

import pytest

from app.deployments.ingress.error_responses import error_reply
from app.deployments.registry.jobs import failure_backoff
from app.deployments.registry.jobs.failure_backoff import FailureBackoff
from app.engine.errors import AdapterQuarantined


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_each_failure_in_a_row_doubles_the_wait() -> None:
    clock = Clock()
    sick = FailureBackoff(clock)
    sick.check("a", "adapter 'a'")
    waits = []
    for number in range(1, 12):
        failure = sick.record_failure("a", "out of order")
        assert failure.num_failures == number
        with pytest.raises(AdapterQuarantined, match=r"'a' failed.*out of order.*registered again") as caught:
            sick.check("a", "adapter 'a'")
        waits.append(caught.value.retry_after_s)
        sick.check("b", "adapter 'b'")
        clock.now_s += waits[-1] - 0.001
        with pytest.raises(AdapterQuarantined):
            sick.check("a", "adapter 'a'")
        clock.now_s += 0.001
        sick.check("a", "adapter 'a'")
    assert waits[:4] == pytest.approx([failure_backoff.FIRST_S * 2**n for n in range(4)])
    assert max(waits) == waits[-1] == pytest.approx(failure_backoff.LONGEST_S)
    sick.clear("a")
    assert sick.record_failure("a", "x").num_failures == 1


def test_memory_of_failures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_backoff, "MAX_KEYS", 3)
    sick = FailureBackoff()
    for key in "abcd":
        sick.record_failure(key, "x")
    assert [sick.get(key) is not None for key in "abcd"] == [False, True, True, True]


def test_the_client_is_told_when_to_come_back() -> None:
    error = pickle.loads(pickle.dumps(AdapterQuarantined("broken", retry_after_s=7.2)))
    answer = error_reply(error)
    assert (answer.status, answer.headers) == (503, {"Retry-After": "8"})
    assert answer.body["error"]["message"] == "broken"
