"""Which KV block belongs to whom, and which holds a prefix worth keeping.

In: numbers of blocks wanted, given back, or full. Out: block numbers. Blocks never learn what they
hold: identity is the hash chain, whose root names base model, adapter contents and tenant salt, so
nothing is shared across any of the three. Every block is either free or counted; a free block may
still hold a published prefix, and the one used longest ago is handed out first. Only full blocks are
shared. K and V themselves belong to the backend.

A prompt's head is its first `HEAD_TOKENS` tokens. Its name, the same in an engine and where requests are placed, is the
beginning of the hash of its last block. The chain's root contains the adapter's digest and the tenant's salt, so equal
texts of two tenants have different names, and a name says nothing about tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

#: Prompt heads that a pool reports, the last used ones.
MAX_HEADS = 32
#: Bytes of a hash that name a head: enough that no two heads of one service are confused.
HEAD_BYTES = 8
#: Tokens of a head, rounded up to whole blocks. A shorter prompt is computed sooner than a replica is waited for.
HEAD_TOKENS = 128


def root_hash(base_digest: str, adapter_digest: str | None, cache_salt: bytes) -> bytes:
    """Root of the hash chain: 32 bytes.

    Fields are length-prefixed and the absent adapter has its own tag, so no choice of digest or
    salt can spell another request's root.
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
    """What a chain that began as the base's goes on from, where an adapter is activated at token `start`: 32 bytes."""
    hasher = hashlib.sha256(b"polylora.kv-activated.v1\0" + parent + start.to_bytes(8, "little"))
    hasher.update(adapter_digest.encode())
    return hasher.digest()


def block_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """Hash of one full block after its parent: 32 bytes, fixed-size fields only."""
    return hashlib.sha256(parent + token_bytes).digest()


def num_prefix_blocks(block_size: int) -> int:
    """Blocks that make a head."""
    return -(-HEAD_TOKENS // block_size)


def prefix_key(
    base_digest: str, adapter_digest: str | None, cache_salt: bytes, token_ids: Sequence[int], block_size: int
) -> bytes | None:
    """The name of a prompt's head, `HEAD_BYTES` long; None if nothing of the prompt comes behind a head.

    Blocks of an activated LoRA have the base's names as far as they are the base's: heads of it are not found.
    """
    num_tokens = num_prefix_blocks(block_size) * block_size
    if len(token_ids) <= num_tokens:  # the last token is always computed: its output is wanted
        return None
    tokens = array("i", token_ids[:num_tokens])
    key = root_hash(base_digest, adapter_digest, cache_salt)
    for start in range(0, num_tokens, block_size):
        key = block_hash(key, tokens[start : start + block_size].tobytes())
    return key[:HEAD_BYTES]


class BlockPool:
    """Reference-counted blocks with an LRU of published, unreferenced ones.

    With `share=False` nothing is ever published or found.
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
        self._heads = CachedPrefixes()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those with a cached prefix included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a published prefix."""
        return self._num_cached

    @property
    def cached_prefixes(self) -> tuple[bytes, ...]:
        """Names of published heads (`prefix_key`), the one that was used last at the end. Any thread may ask."""
        return self._heads.told

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
        """Blocks left to hand out if `blocks` (from `find`) were referenced."""
        return len(self._free) - sum(1 for block in blocks if self._num_refs[block] == 0)

    def reference(self, blocks: Iterable[int]) -> None:
        """Hold blocks returned by `find` in the same step."""
        for block in blocks:
            if self._num_refs[block] == 0:
                del self._free[block]
                self._num_cached -= 1
            self._num_refs[block] += 1
            self._heads.use(block)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks to write into, or None and nothing changed. Least recently used prefixes go first."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _unused = self._free.popitem(last=False)
            published = self._published[block]
            if published is not None:
                del self._by_hash[published[0]]
                self._published[block] = None
                self._num_cached -= 1
                self._heads.drop(block)
            self._num_refs[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, key: bytes, token_bytes: bytes, *, is_head: bool = False) -> None:
        """Offer a full, computed, held block to later prefixes. The first publisher of a hash stays.

        `is_head`: the chain up to it is what a prompt begins with, and is told.
        """
        assert self._num_refs[block] > 0, "only a held block can be published"
        if self._share and key not in self._by_hash and self._published[block] is None:
            self._by_hash[key] = block
            self._published[block] = (key, token_bytes)
            if is_head:
                self._heads.add(block, key)

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference back for each block, in table order: a chain's tail is reused before its head."""
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


class CachedPrefixes:
    """Prompt heads that one pool has cached, by the block that ends each. Any thread may read `told`."""

    def __init__(self) -> None:
        self._of_block: dict[int, bytes] = {}
        self._last: dict[bytes, None] = {}  # those that were used last, the very last one at the end

    @property
    def told(self) -> tuple[bytes, ...]:
        """Names, each `HEAD_BYTES` long, in order of their last use."""
        return tuple(self._last.copy())

    def add(self, block: int, key: bytes) -> None:
        """A head is cached: `key` [32] is the hash of its last block."""
        self._of_block[block] = key[:HEAD_BYTES]
        self.use(block)

    def use(self, block: int) -> None:
        """A block was found in the cache; nothing happens if no head ends with it."""
        name = self._of_block.get(block)
        if name is None:
            return
        self._last.pop(name, None)
        self._last[name] = None
        if len(self._last) > MAX_HEADS:
            del self._last[next(iter(self._last))]

    def drop(self, block: int) -> None:
        """A block holds something else from now on."""
        name = self._of_block.pop(block, None)
        if name is not None:
            self._last.pop(name, None)
