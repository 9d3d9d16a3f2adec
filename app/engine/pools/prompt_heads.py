"""The name of what a prompt begins with: the same in an engine and in whoever places requests.

In: the tokens of a prompt, and what keys its cache. Out: the name of its head, its first `HEAD_TOKENS` tokens. Rule: a
name is the beginning of the hash chain's hash of the head's last block, as `Sequence.extend_hashes` has it. The root of
that chain has the adapter's digest and the tenant's salt in it, so equal texts of two tenants have different names.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from app.engine.pools.cached_heads import HEAD_BYTES
from app.engine.pools.kv_blocks import block_hash, root_hash

#: Tokens of a head, rounded up to whole blocks. A shorter prompt is computed sooner than a replica is waited for.
HEAD_TOKENS = 128


def num_head_blocks(block_size: int) -> int:
    """Blocks that make a head."""
    return -(-HEAD_TOKENS // block_size)


def prompt_head(
    base_digest: str, adapter_digest: str | None, cache_salt: bytes, token_ids: Sequence[int], block_size: int
) -> bytes | None:
    """The name of a prompt's head, `HEAD_BYTES` long; None if nothing of the prompt comes behind a head.

    Blocks of an activated LoRA have the base's names as far as they are the base's: heads of it are not found.
    """
    num_tokens = num_head_blocks(block_size) * block_size
    if len(token_ids) <= num_tokens:  # the last token is always computed: its output is wanted
        return None
    tokens = array("i", token_ids[:num_tokens])
    key = root_hash(base_digest, adapter_digest, cache_salt)
    for start in range(0, num_tokens, block_size):
        key = block_hash(key, tokens[start : start + block_size].tobytes())
    return key[:HEAD_BYTES]
