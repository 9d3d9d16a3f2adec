"""What others wrote: keys are found whole and cut off, and nothing controls a terminal."""

from __future__ import annotations

import pytest

from app.deployments.tenancy.auth.key_crypto import new_key, redact_key
from app.redaction import escape_control_chars, holds_key, without_keys


@pytest.mark.parametrize("is_admin", [False, True])
def test_keys_are_found_whole_and_cut_off(is_admin: bool) -> None:
    for _ in range(100):
        key = new_key(is_admin=is_admin).value
        prefix = key[:-43]
        for told in (key, key[:-10], key[: len(prefix) + 12]):
            assert holds_key(f"model '{told}'")
            assert without_keys(f"model '{told}', {told}") == f"model '{prefix}...', {prefix}..."
        assert without_keys(redact_key(key)) == redact_key(key), "people tell keys apart by these"


@pytest.mark.parametrize("text", ["", "sk-poly-", "sk-poly-short", "task-poly", "polylora-sk-admin", "a/b?c=d"])
def test_other_text_stays(text: str) -> None:
    assert not holds_key(text)
    assert without_keys(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, ünïcödé 日本 😀", "plain, ünïcödé 日本 😀"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b]0;title\x07\x9b2J", r"\x1b]0;title\x07\x9b2J"),
        ("evil\u202egpj.exe", r"evil\u202egpj.exe"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_control_characters_are_escaped(text: str, expected: str) -> None:
    assert escape_control_chars(text) == expected
    assert escape_control_chars("a\n\x1b", keep="\n") == "a\n\\x1b"
