"""Text from a stream of token ids, never cutting a character in two.

`push` returns the text that is certain so far and `flush` the rest; together they equal decoding all ids at once. Each
id costs O(1): byte-level vocabularies use a table of bytes and an incremental UTF-8 decoder; others decode a window of
the last tokens. Where tokens may stand for single bytes ("<0x0A>"), a run of them gives no text before it ends, because
one broken byte changes the text of the whole run.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_MAX_PENDING = 16
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer(Protocol):
    """The state of one stream."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these ids; may be empty."""
        ...

    def flush(self) -> str:
        """The remaining text; an unfinished character becomes U+FFFD. Empties the state."""
        ...


class ByteDecoder:
    """For byte-level vocabularies. `token_bytes[id]` is shared and not modified."""

    __slots__ = ("_hidden", "_rest", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes], hidden: frozenset[int]) -> None:
        self._token_bytes, self._hidden = token_bytes, hidden
        self._rest = b""  # the beginning of a character

    def push(self, token_ids: Sequence[int]) -> str:
        raw, known = self._rest, len(self._token_bytes)
        for token_id in token_ids:
            if token_id < known and token_id not in self._hidden:
                raw += self._token_bytes[token_id]
        text, num_decoded = codecs.utf_8_decode(raw, "replace", False)
        self._rest = raw[num_decoded:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class WindowDecoder:
    """For any other decoder: text is certain once it does not end in a replacement character.

    The window starts one certain group back, because decoders treat a first token differently (they strip its space).
    byte_ids: tokens that stand for one byte each; text is certain once the last token is not one of them. Without
    byte_ids, a run of broken bytes longer than 16 tokens is emitted as it is.
    """

    __slots__ = ("_byte_ids", "_certain", "_certain_text", "_decode", "_hidden", "_ids")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int], byte_ids: frozenset[int] = frozenset()
    ) -> None:
        self._decode, self._hidden, self._byte_ids = decode, hidden, byte_ids
        self._ids: list[int] = []
        self._certain = 0  # how many of _ids have been emitted as text
        self._certain_text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._hidden])

    def flush(self) -> str:
        text = self._decode(self._ids)[len(self._certain_text) :] if len(self._ids) > self._certain else ""
        self._ids, self._certain, self._certain_text = [], 0, ""
        return text

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._ids)
        pending = len(self._ids) - self._certain
        is_cut = text.endswith(_REPLACEMENT) and not self._byte_ids
        if pending < _MAX_PENDING and (is_cut or len(text) <= len(self._certain_text)):
            return ""
        new = text[len(self._certain_text) :]
        self._ids = self._ids[self._certain :]
        self._certain, self._certain_text = len(self._ids), self._decode(self._ids)
        return new
