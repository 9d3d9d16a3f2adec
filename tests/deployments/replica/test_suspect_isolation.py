"""Suspects are tried one at a time, and none is left waiting after a trial has ended."""

from __future__ import annotations

import pickle
from dataclasses import replace

from app.deployments.replica.suspect_isolation import SuspectQueue
from app.deployments.rpc.transport import EngineFailed
from app.engine.errors import EngineFailure
from app.engine.request import TokenChunk
from tests.fakes import fake_request


class Engine:
    """Records who enters; rejects the given requests."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.refused: set[str] = set()
        self.trials = SuspectQueue()

    def try_(self, request_id: str, num_failures: int = 1) -> None:
        def enter() -> bool:
            self.entered.append(request_id)
            return request_id not in self.refused

        self.trials.add(replace(fake_request(request_id, [1]), num_failures=num_failures), enter)


def test_a_trial_ends_with_the_first_new_token() -> None:
    engine = Engine()
    for name in "abc":
        engine.try_(name)
    assert engine.entered == ["a"]
    assert engine.trials.num_waiting == 2
    engine.trials.on_chunk(TokenChunk("another", (1,)))
    engine.trials.on_chunk(TokenChunk("b", (1,)))
    engine.trials.on_chunk(TokenChunk("a"))
    assert engine.trials.current == "a"
    engine.trials.on_chunk(TokenChunk("a", (1,)))
    assert engine.trials.current == "b"
    engine.trials.on_chunk(TokenChunk("b", finish_reason="length"))
    assert engine.entered == ["a", "b", "c"]
    engine.trials.on_chunk(TokenChunk("c", (1,)))
    assert engine.trials.current is None


def test_who_got_on_between_two_failures_is_on_trial_to_the_end() -> None:
    engine = Engine()
    engine.try_("a", num_failures=2)
    engine.try_("b")
    engine.trials.on_chunk(TokenChunk("a", (1,)))
    assert engine.trials.current == "a"
    engine.trials.on_chunk(TokenChunk("a", (1,), finish_reason="stop"))
    assert engine.trials.current == "b"


def test_who_is_aborted_or_refused_makes_room() -> None:
    engine = Engine()
    engine.refused = {f"refused{i}" for i in range(3000)}
    for name in ("a", "b", *sorted(engine.refused), "c"):
        engine.try_(name)
    engine.trials.remove("b")
    assert engine.entered == ["a"]
    engine.trials.remove("a")
    assert engine.trials.current == "c"
    assert engine.entered == ["a", *sorted(engine.refused), "c"]
    engine.trials.remove("c")
    assert (engine.trials.current, engine.trials.num_waiting) == (None, 0)


def test_who_is_to_blame_survives_the_way_between_processes() -> None:
    failed = pickle.loads(pickle.dumps(EngineFailed("an illegal instruction", ["a/1", "b/1"], culprit="c/2")))
    assert (str(failed), failed.suspects, failed.culprit) == ("an illegal instruction", {"a/1", "b/1"}, "c/2")
    failure = pickle.loads(pickle.dumps(EngineFailure("stopped", computing=["a"])))
    assert (str(failure), failure.computing) == ("stopped", {"a"})
