"""Which adapters this engine serves.

In: a request and the weights that came with it, or an adapter that is to be written. Out: nothing, or the error to
answer with. Rule: what passes here fits the adapter tables when nothing else is in them. Any thread.
"""

from __future__ import annotations

from app.engine.adapters.card import AdapterCard, AdapterRef
from app.engine.adapters.lora import LoraAdapter
from app.engine.backend import BackendLimits
from app.engine.errors import AdapterMergedAway, AdapterMismatch, InvalidRequest
from app.engine.models.spec import ModelSpec
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.request import GenerateRequest


class AdapterCheck:
    """`merged`: the adapter that the backend's weights hold, and that alone is served."""

    def __init__(
        self, spec: ModelSpec, adapters: AdapterPool, limits: BackendLimits, merged: AdapterCard | None
    ) -> None:
        self._spec, self._adapters, self._limits, self._merged = spec, adapters, limits, merged

    def request(self, request: GenerateRequest, adapter: LoraAdapter | None) -> None:
        """Raises InvalidRequest for other weights than the request names, AdapterMergedAway, and as `adapter`."""
        ref = request.adapter
        if self._merged is not None:
            self._is_merged(self._merged, ref)
        elif ref is not None and adapter is not None and ref.digest == adapter.card.digest:
            self.adapter(adapter, ref.name)
        elif ref is not None or adapter is not None:
            named = ref.digest if ref is not None else "none"
            given = adapter.card.digest if adapter is not None else "none"
            raise InvalidRequest(
                f"the request names adapter digest {named} but the weights given are {given}", param="adapter"
            )

    def adapter(self, adapter: LoraAdapter, name: str) -> None:
        """Raises AdapterMismatch, AdapterTooLarge, AdapterMergedAway."""
        card = adapter.card
        if self._merged is not None:
            self._is_merged(self._merged, AdapterRef(name, card.digest, ""))
            return
        if card.base_digest != self._spec.digest:
            raise AdapterMismatch(
                f"adapter {name!r} was read for base model {card.base_digest} "
                f"but this engine serves {self._spec.digest}; register it for this base"
            )
        self._adapters.check_rows(name, self._limits.rank_rows_of(adapter))
        self._adapters.check_extras(name, self._limits.extra_bytes_of(adapter))

    @staticmethod
    def _is_merged(merged: AdapterCard, ref: AdapterRef | None) -> None:
        if ref is None or ref.digest != merged.digest:
            asked = "the base" if ref is None else f"adapter {ref.name!r}"
            raise AdapterMergedAway(
                f"{asked} was asked for, but engine.merged_adapter has merged the adapter with digest "
                f"{merged.digest[:12]}… into its weights and serves nothing else; ask a service without it"
            )
