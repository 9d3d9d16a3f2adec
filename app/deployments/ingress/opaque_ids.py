"""Ids that say which record, and not how many there are: what a project sees in place of the database's numbers.

In: a number, and a secret of whoever reads. Out: text, and the number again. Rule: a reader has one id for a number;
to it ids are random, so those of its own records do not tell how many of others' lie between them, and none that was
not told to it means anything. As in RFC 5297, but of HMAC-SHA256: a tag of the number, and the number under a mask
that is made of the tag.
"""

from __future__ import annotations

import hmac
import re

_TAG_BYTES, _NUMBER_BYTES = 16, 8
_ID = re.compile(f"[0-9a-f]{{{2 * (_TAG_BYTES + _NUMBER_BYTES)}}}")


class OpaqueIds:
    """`secret` is the reader's; ids of different kinds have nothing to do with each other."""

    def __init__(self, secret: bytes, kind: str) -> None:
        self._tag_key, self._mask_key = (
            hmac.digest(secret, f"polylora {use} of {kind} ids".encode(), "sha256") for use in ("tag", "mask")
        )

    def id_of(self, number: int) -> str:
        """48 hexadecimal digits. The number has at most 64 bits."""
        tag = self._tag(number)
        return (tag + self._masked(tag, number).to_bytes(_NUMBER_BYTES)).hex()

    def number_of(self, text: str) -> int | None:
        """None for what is no id of this reader's."""
        if _ID.fullmatch(text) is None:
            return None
        content = bytes.fromhex(text)
        tag, masked = content[:_TAG_BYTES], content[_TAG_BYTES:]
        number = self._masked(tag, int.from_bytes(masked))
        return number if hmac.compare_digest(self._tag(number), tag) else None

    def _tag(self, number: int) -> bytes:
        return hmac.digest(self._tag_key, number.to_bytes(_NUMBER_BYTES), "sha256")[:_TAG_BYTES]

    def _masked(self, tag: bytes, number: int) -> int:
        return number ^ int.from_bytes(hmac.digest(self._mask_key, tag, "sha256")[:_NUMBER_BYTES])
