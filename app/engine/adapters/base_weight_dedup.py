"""Drops embedding and output matrices of an adapter that equal the base's, or the part of them that does.

PEFT saves these matrices beside a LoRA on them, changed or not, and each would waste hundreds of megabytes. Equal means
bit for bit in float32. Where the adapter's matrix was resized, the rows that both have are compared, and those that it
has beyond the base's become token rows. The digest stays that of the saved contents. The base's matrices are hashed
once, when the first adapter brings one. A matrix that differs and is not supported is refused by name.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter, TokenRows, check_features, read_only
from app.engine.adapters.extra_weights import extra_bytes
from app.engine.adapters.sandbox.packing import PackedAdapter, pack_adapter, unpack_adapter
from app.engine.models.checkpoint import Checkpoint
from app.engine.models.weight_names import EMBEDDING, LM_HEAD


class BaseWeightDedup:
    """Thread-safe. supported_features: see `build_adapter`."""

    def __init__(self, checkpoint: Checkpoint, supported_features: frozenset[str]) -> None:
        self._checkpoint, self._supported_features = checkpoint, supported_features
        self._lock = threading.Lock()
        self._hashes: dict[int, dict[str, bytes]] = {}  # by number of rows

    def without_copies(self, adapter: LoraAdapter) -> LoraAdapter:
        """The adapter without copies of the base; itself if it has none. Raises AdapterMismatch for unsupported
        features.
        """
        num_base = self._checkpoint.spec.vocab_size
        copies = {name for name in (EMBEDDING, LM_HEAD) if self._is_copy(name, adapter.replaced.get(name))}
        if not copies:
            check_features(adapter, self._supported_features)
            return adapter
        rest = {name: values for name, values in adapter.replaced.items() if name not in copies}
        token_rows = dict(adapter.token_rows)
        appended: dict[int, TokenRows] = {}  # of a matrix at both ends once
        for name in sorted(copies):
            matrix, end = adapter.replaced[name], name.split(".")[-2]
            if len(matrix) > num_base:
                rows = appended.setdefault(id(matrix), _appended_rows(matrix, num_base))
                token_rows[end] = _overwritten(rows, token_rows.get(end))
        deduplicated = replace(adapter, replaced=MappingProxyType(rest), token_rows=MappingProxyType(token_rows))
        check_features(deduplicated, self._supported_features)
        dropped_bytes = {id(adapter.replaced[name]): adapter.replaced[name].nbytes for name in copies}
        new = {id(rows): rows.nbytes for _, rows in token_rows.values()}
        old = {id(rows): rows.nbytes for _, rows in adapter.token_rows.values()}
        size_bytes = adapter.card.size_bytes - sum(dropped_bytes.values()) + sum(new.values()) - sum(old.values())
        card = replace(
            adapter.card,
            size_bytes=size_bytes,
            extra_bytes=extra_bytes(deduplicated, self._checkpoint.spec),
            is_zero=deduplicated.is_zero,
        )
        return replace(deduplicated, card=card)

    def without_copies_packed(self, packed: PackedAdapter) -> PackedAdapter:
        """The same for a packed adapter, which is repacked if something is dropped."""
        if not any(name in (EMBEDDING, LM_HEAD) for name, _ in packed.header["replaced"]):
            return packed
        adapter = unpack_adapter(packed.header, packed.arrays)
        deduplicated = self.without_copies(adapter)
        return packed if deduplicated is adapter else pack_adapter(deduplicated)

    def _is_copy(self, name: str, values: NDArray[np.float32] | None) -> bool:
        if values is None:
            return False
        num_rows = min(len(values), self._checkpoint.spec.vocab_size)
        return _hash(values[:num_rows]) == self._base_hashes(num_rows)[name]

    def _base_hashes(self, num_rows: int) -> dict[str, bytes]:
        """Hashes of the first rows of the base's matrices, by name."""
        with self._lock:
            if num_rows not in self._hashes:
                is_tied = self._checkpoint.spec.tie_embeddings
                names = {EMBEDDING} if is_tied else {EMBEDDING, LM_HEAD}
                found: dict[str, bytes] = {}
                for name, tensor in self._checkpoint.tensors():
                    if name in names:
                        found[name] = _hash(np.asarray(tensor)[:num_rows].astype(np.float32, copy=False))
                    if len(found) == len(names):
                        break
                self._hashes[num_rows] = found | ({LM_HEAD: found[EMBEDDING]} if is_tied else {})
            return self._hashes[num_rows]


def _appended_rows(matrix: NDArray[np.float32], num_base: int) -> TokenRows:
    """The rows of a matrix beyond the base's; a copy, so that the matrix can be freed."""
    return TokenRows(tuple(range(num_base, len(matrix))), read_only(matrix[num_base:].copy()))


def _overwritten(rows: TokenRows, own: TokenRows | None) -> TokenRows:
    """`rows` and those of `own`, which win."""
    if own is None:
        return rows
    kept = [index for index, token_id in enumerate(rows.token_ids) if token_id not in set(own.token_ids)]
    ids = (*own.token_ids, *(rows.token_ids[index] for index in kept))
    return TokenRows(ids, read_only(np.concatenate([own.rows, rows.rows[kept]])))


def _hash(values: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").data).digest()
