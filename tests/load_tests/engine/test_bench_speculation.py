"""The benchmark of guessing ahead: its cases are what they are called, and its answers are compared."""

from __future__ import annotations

from pathlib import Path

from load_tests.engine.bench_speculation import Settings, cases


def test_every_case_is_what_it_is_called() -> None:
    found = cases(Settings(Path(), Path(), streams=(1, 8)))
    assert list(found)[-2:] == ["free text, 1 stream", "free text, 8 streams"]
    for name, case in found.items():
        assert case.has_adapter == (", adapter" in name)
        assert bool(case.grammar) == ("schema" in name)
        assert bool(case.prediction) == ("prediction" in name)
        assert case.at_once == name.startswith("free text")
    assert len(set(found["free text, 8 streams"].prompts)) == 8
