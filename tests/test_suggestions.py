"""Suggestions for unknown keys: only close ones."""

from __future__ import annotations

import pytest

from app.config import AppConfig
from app.suggestions import did_you_mean, fields_at, settings_at


@pytest.mark.parametrize(
    ("word", "guess"),
    [
        ("max_token", "max_tokens"),
        ("num_replica", "num_replicas"),
        ("stops", "stop"),
        ("x", None),
        ("replicas", "num_replicas"),
        ("logit_bias", None),
        ("lora_name", "name"),
        ("best_n", None),
    ],
)
def test_a_guess_is_close(word: str, guess: str | None) -> None:
    known = ["max_tokens", "num_replicas", "stop", "temperature", "name", "n"]
    assert did_you_mean(word, known) == (f"; did you mean {guess!r}?" if guess else "")


def test_a_word_of_a_megabyte_is_compared_in_part() -> None:
    assert did_you_mean("max_tokens" * 100_000, ["max_tokens"]) == ""


def test_fields_are_found_where_they_lie() -> None:
    assert "uri" in fields_at(AppConfig, ["model"])
    assert "path" in fields_at(AppConfig, ["adapters", "preload", 0])
    assert "num_threads" in fields_at(AppConfig, ["engine", "cpu"])
    assert {"cpu", "cpu.num_threads", "xla.num_threads"} & settings_at(AppConfig, ["engine"]) == {
        "cpu", "cpu.num_threads",
    }  # fmt: skip
    assert fields_at(AppConfig, ["model", "uri"]) == fields_at(AppConfig, ["nothing", "here"]) == set()
