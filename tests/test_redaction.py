"""Keys in text: found whole and cut off, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from app.deployments.tenancy.auth.key_crypto import new_key, redact_key
from app.redaction import holds_key, without_keys


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
