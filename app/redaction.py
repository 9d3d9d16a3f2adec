"""What others wrote, made safe for logs and terminals: API keys removed, control characters escaped.

A truncated key is removed too, as long as enough of it remains to guess the rest more easily than a whole key.
"""

from __future__ import annotations

import re

#: A key's prefix (`key_crypto`) and more of it than a name would contain by chance.
_KEY = re.compile(r"(sk-(?:admin-)?poly-)[A-Za-z0-9_-]{12,}")


def holds_key(text: str) -> bool:
    """Whether the text contains an API key, or a large part of one."""
    return _KEY.search(text) is not None


def without_keys(text: str) -> str:
    """The text with dots after the prefix of every key."""
    return _KEY.sub(r"\1...", text) if "sk-" in text else text


def escape_control_chars(text: str, keep: str = "") -> str:
    """The text with escapes in place of control characters: line breaks, terminals' sequences, directions of text.

    keep: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
