"""API keys where none belong: in a path, a model's name, a source, a line of a log.

In: text that somebody sent, or that is about to be written or answered. Out: the same without keys. Rule: what is cut
off is taken for a key, too, as long as enough of it is left that the rest could be guessed sooner than a whole one.
"""

from __future__ import annotations

import re

#: As keys begin (`tenants.key_material`), and more of one than a name would have by chance.
_KEY = re.compile(r"(sk-(?:admin-)?poly-)[A-Za-z0-9_-]{12,}")


def holds_key(text: str) -> bool:
    """Whether an API key, or much of one, is in it."""
    return _KEY.search(text) is not None


def without_keys(text: str) -> str:
    """Dots in place of what follows a key's prefix."""
    return _KEY.sub(r"\1...", text) if "sk-" in text else text
