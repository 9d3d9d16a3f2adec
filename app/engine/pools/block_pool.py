"""The block pool: which KV blocks are in use, and which hold a cached prefix.

A block's identity is a hash chain whose root includes the base model, the adapter's digest and the tenant's salt, so
nothing is shared across any of the three. Every block is free or referenced; a free block may still hold a published
prefix, and the least recently used one is handed out first. Only full blocks are shared. K and V themselves belong to
the backend.

For routing, a prompt's prefix is its first `PREFIX_TOKENS` tokens. Its key, the same in an engine and where requests
are routed, is the beginning of the hash of its last block. Equal texts of two tenants have different keys, and a key
says nothing about tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

#: The number of cached prefixes that a pool reports, the most recently used ones.
MAX_CACHED_PREFIXES = 32
#: Bytes of a prefix's key: enough that no two prefixes of one service have the same.
PREFIX_KEY_BYTES = 8
#: Tokens of a prefix, rounded up to whole blocks. A shorter prompt is computed sooner than it would wait for a replica.
PREFIX_TOKENS = 128


def root_hash(base_digest: str, adapter_digest: str | None, cache_salt: bytes) -> bytes:
    """Root of the hash chain: 32 bytes.

    Fields are length-prefixed and the absent adapter has its own tag, so no choice of digest or salt can spell another
    request's root.
    """
    hasher = hashlib.sha256(b"polylora.kv-root.v1\0")
    for field in (base_digest.encode(), cache_salt):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    if adapter_digest is None:
        hasher.update(b"base")
    else:
        name = adapter_digest.encode()
        hasher.update(b"lora" + len(name).to_bytes(8, "little") + name)
    return hasher.digest()


def activation_hash(parent: bytes, adapter_digest: str, start: int) -> bytes:
    """Parent hash of the blocks that follow an adapter's activation at token `start` of a base chain: 32 bytes."""
    hasher = hashlib.sha256(b"polylora.kv-activated.v1\0" + parent + start.to_bytes(8, "little"))
    hasher.update(adapter_digest.encode())
    return hasher.digest()


def block_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """Hash of one full block after its parent: 32 bytes, fixed-size fields only."""
    return hashlib.sha256(parent + token_bytes).digest()


def num_prefix_blocks(block_size: int) -> int:
    """Blocks of a prefix."""
    return -(-PREFIX_TOKENS // block_size)


def prefix_key(
    base_digest: str, adapter_digest: str | None, cache_salt: bytes, token_ids: Sequence[int], block_size: int
) -> bytes | None:
    """The key of a prompt's prefix, `PREFIX_KEY_BYTES` long; None if the prompt is not longer than a prefix.

    The blocks of an activated LoRA before its activation have the base's hashes, so their prefixes are not found by it.
    """
    num_tokens = num_prefix_blocks(block_size) * block_size
    if len(token_ids) <= num_tokens:  # the last token is always computed: its output is needed
        return None
    tokens = array("i", token_ids[:num_tokens])
    key = root_hash(base_digest, adapter_digest, cache_salt)
    for start in range(0, num_tokens, block_size):
        key = block_hash(key, tokens[start : start + block_size].tobytes())
    return key[:PREFIX_KEY_BYTES]


class BlockPool:
    """Reference-counted blocks with an LRU of published, unreferenced ones.

    With `share=False` nothing is published or found.
    """

    def __init__(self, num_blocks: int, block_size: int, *, share: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._share = share
        self._num_refs = [0] * num_blocks
        self._published: list[tuple[bytes, bytes] | None] = [None] * num_blocks  # (hash, token bytes)
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # first is handed out first
        self._num_cached = 0
        self._cached_prefixes = CachedPrefixes()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a published prefix."""
        return self._num_cached

    @property
    def cached_prefixes(self) -> tuple[bytes, ...]:
        """Keys of cached prefixes (`prefix_key`), the last used at the end. Any thread."""
        return self._cached_prefixes.keys

    def find(self, hashes: Iterable[bytes], block_bytes: Callable[[int], bytes]) -> list[int]:
        """The longest cached prefix: block numbers, not yet referenced.

        `block_bytes(i)` are the token ids of block i: a hit must match them, whatever its hash.
        """
        found: list[int] = []
        for index, key in enumerate(hashes):
            block = self._by_hash.get(key)
            if block is None:
                break
            published = self._published[block]
            if published is None or published[1] != block_bytes(index):
                break
            found.append(block)
        return found

    def num_free_without(self, blocks: Iterable[int]) -> int:
        """Blocks that could still be allocated if `blocks` (from `find`) were referenced."""
        return len(self._free) - sum(1 for block in blocks if self._num_refs[block] == 0)

    def reference(self, blocks: Iterable[int]) -> None:
        """Reference blocks that `find` returned in the same step."""
        for block in blocks:
            if self._num_refs[block] == 0:
                del self._free[block]
                self._num_cached -= 1
            self._num_refs[block] += 1
            self._cached_prefixes.use(block)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks to write into, or None and nothing changed. Least recently used prefixes go first."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _unused = self._free.popitem(last=False)
            self._forget(block)
            self._num_refs[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: bytes, token_bytes: bytes, *, ends_prefix: bool = False) -> None:
        """Make a full, computed, referenced block available to later prefixes. The first publisher of a hash stays.

        `ends_prefix`: it is the last block of a prompt's prefix, whose key is reported.
        """
        assert self._num_refs[block] > 0, "only a held block can be published"
        if self._share and key not in self._by_hash and self._published[block] is None:
            self._by_hash[key] = block
            self._published[block] = (key, token_bytes)
            if ends_prefix:
                self._cached_prefixes.add(block, key)

    def release(self, blocks: Sequence[int]) -> None:
        """Release one reference per block, in table order: the end of a chain is reused before its beginning."""
        for block in reversed(blocks):
            refs = self._num_refs[block] - 1
            assert refs >= 0, "block released twice"
            self._num_refs[block] = refs
            if refs == 0:
                self._free[block] = None
                if self._published[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self._num_cached += 1

    def used_blocks(self, *, keeps_prefixes: bool = True) -> list[int]:
        """Blocks that are referenced or hold a cached prefix, which is forgotten without `keeps_prefixes`.

        Orders the others: the lowest are handed out first.
        """
        if not keeps_prefixes:
            for block in self._free:
                self._forget(block)
        unused = sorted(block for block in self._free if self._published[block] is None)
        for block in reversed(unused):
            self._free.move_to_end(block, last=False)
        return sorted(set(range(self.num_blocks)).difference(unused))

    def num_refs(self) -> list[int]:
        """References per block."""
        return list(self._num_refs)

    def check(self) -> None:
        """Assert that every block is accounted for; for tests, O(blocks)."""
        for block in range(self.num_blocks):
            assert (self._num_refs[block] == 0) == (block in self._free), f"block {block} is neither free nor held"
            published = self._published[block]
            assert published is None or self._by_hash[published[0]] == block
        assert len(self._by_hash) == sum(1 for entry in self._published if entry is not None)
        assert self._num_cached == sum(1 for block in self._free if self._published[block] is not None)

    def _forget(self, block: int) -> None:
        """The prefix that a free block holds, if there is one."""
        if (published := self._published[block]) is not None:
            del self._by_hash[published[0]]
            self._published[block] = None
            self._num_cached -= 1
            self._cached_prefixes.drop(block)


class CachedPrefixes:
    """The cached prefixes of one pool, by the block that ends each. Any thread may read `keys`."""

    def __init__(self) -> None:
        self._of_block: dict[int, bytes] = {}
        self._last: dict[bytes, None] = {}  # the most recently used ones, the last at the end

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Keys, each `PREFIX_KEY_BYTES` long, in order of their last use."""
        return tuple(self._last.copy())

    def add(self, block: int, key: bytes) -> None:
        """Add a prefix: `key` [32] is the hash of its last block."""
        self._of_block[block] = key[:PREFIX_KEY_BYTES]
        self.use(block)

    def use(self, block: int) -> None:
        """Mark the prefix that ends with this block as used, if there is one."""
        name = self._of_block.get(block)
        if name is None:
            return
        self._last.pop(name, None)
        self._last[name] = None
        if len(self._last) > MAX_CACHED_PREFIXES:
            del self._last[next(iter(self._last))]

    def drop(self, block: int) -> None:
        """Remove the prefix that ends with this block: the block is reused."""
        name = self._of_block.pop(block, None)
        if name is not None:
            self._last.pop(name, None)
