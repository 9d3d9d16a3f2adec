"""Which of the heads that prompts begin with a block pool has cached, those that were used last.

In: blocks that end a head, as they are published, found and reused. Out: short names of the heads, at most `MAX_HEADS`.
Rule: a name is the beginning of the hash of the head's last block (`prompt_heads`), so whoever knows names learns
nothing of tokens, and nobody finds the heads of another tenant by them.
"""

from __future__ import annotations

#: So many heads are told, those that were used last.
MAX_HEADS = 32
#: Of a hash so many bytes are told: enough that no two of a fleet's heads are taken for each other.
HEAD_BYTES = 8


class CachedHeads:
    """Those of one pool, by the block that ends each. `told` may be asked for by any thread."""

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
