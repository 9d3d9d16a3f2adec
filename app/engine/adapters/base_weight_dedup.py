"""Drops embedding and output matrices of an adapter that equal the base's.

PEFT saves these matrices beside a LoRA on them, changed or not, and each would waste hundreds of megabytes. Equal means
bit for bit in float32. The digest stays that of the saved contents. The base's matrices are hashed once, when the first
adapter brings one. A matrix that differs and is not supported is refused by name.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter, check_features
from app.engine.adapters.extra_weights import extra_bytes
from app.engine.adapters.sandbox.packing import PackedAdapter, pack_adapter, unpack_adapter
from app.engine.models.checkpoint import Checkpoint
from app.engine.models.weight_names import EMBEDDING, LM_HEAD


class BaseWeightDedup:
    """Thread-safe. supported_features: see `build_adapter`."""

    def __init__(self, checkpoint: Checkpoint, supported_features: frozenset[str]) -> None:
        self._checkpoint, self._supported_features = checkpoint, supported_features
        self._lock = threading.Lock()
        self._hashes: dict[str, bytes] | None = None

    def without_copies(self, adapter: LoraAdapter) -> LoraAdapter:
        """The adapter without copies of the base; itself if it has none. Raises AdapterMismatch for unsupported
        features.
        """
        copies = {name for name in (EMBEDDING, LM_HEAD) if self._is_copy(name, adapter.replaced.get(name))}
        if not copies:
            check_features(adapter, self._supported_features)
            return adapter
        rest = {name: values for name, values in adapter.replaced.items() if name not in copies}
        deduplicated = replace(adapter, replaced=MappingProxyType(rest))
        check_features(deduplicated, self._supported_features)
        dropped_bytes = {id(adapter.replaced[name]): adapter.replaced[name].nbytes for name in copies}
        size_bytes = adapter.card.size_bytes - sum(dropped_bytes.values())
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
        return values is not None and _hash(values) == self._base_hashes()[name]

    def _base_hashes(self) -> dict[str, bytes]:
        with self._lock:
            if self._hashes is None:
                is_tied = self._checkpoint.spec.tie_embeddings
                names = {EMBEDDING} if is_tied else {EMBEDDING, LM_HEAD}
                found: dict[str, bytes] = {}
                for name, tensor in self._checkpoint.tensors():
                    if name in names:
                        found[name] = _hash(np.asarray(tensor).astype(np.float32, copy=False))
                    if len(found) == len(names):
                        break
                self._hashes = found | ({LM_HEAD: found[EMBEDDING]} if is_tied else {})
            return self._hashes


def _hash(values: NDArray[np.float32]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(values, "<f4").data).digest()
