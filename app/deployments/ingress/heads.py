"""What a request's prompt begins with, named as engines name what they have cached.

In: requests. Out: names in hexadecimal digits, as placement's table has them. Rule: the name is computed from the
adapter's digest and the tenant's salt as well, by the function that the engine's own names come from.
"""

from __future__ import annotations

from app.engine.pools.kv_blocks import prompt_head
from app.engine.request import GenerateRequest


class Heads:
    """Of requests for one base model, by its digest. `block_size`: that of the engines' KV blocks."""

    def __init__(self, base_digest: str, block_size: int) -> None:
        self._base_digest = base_digest
        self._block_size = block_size

    def of(self, request: GenerateRequest) -> str | None:
        """None for a prompt that is too short, and for texts to embed: they are alike seldom."""
        if request.pooling is not None:
            return None
        digest = None if request.adapter is None else request.adapter.digest
        head = prompt_head(self._base_digest, digest, request.cache_salt, request.token_ids, self._block_size)
        return None if head is None else head.hex()
