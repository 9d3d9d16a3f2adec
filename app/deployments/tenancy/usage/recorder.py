"""What requests have taken, as rows of the ledger.

In: requests that are admitted, what engines say that they consumed, adapters that were loaded for nobody's request.
Out: charges, added to a `UsageFlusher`. Rule: an ingress counts that a request came, and the engine where it ended counts
all that was computed and held for it, so that tenants' sums are engines' sums, whatever becomes of ingresses.
"""

from __future__ import annotations

from collections.abc import Callable

from app.deployments.tenancy.usage.flusher import LedgerKey, RouteKind, UsageFlusher, UsageRecord
from app.deployments.tenancy.usage.prices import Prices, paid_models
from app.engine.adapters.card import AdapterRef
from app.engine.request import GenerateRequest, RequestUsage, Usage

#: Of a model's name in the ledger.
MAX_MODEL_CHARS = 128


class UsageRecorder:
    """One per process. `clock` gives Unix time; `base_name` is the base model's."""

    def __init__(self, metering: UsageFlusher, prices: Prices, base_name: str, clock: Callable[[], float]) -> None:
        self.metering = metering
        self._prices = prices
        self._base_name = base_name
        self._clock = clock

    def came(self, request: GenerateRequest) -> None:
        """A client's request was admitted; `request` is the first of its sequences."""
        self.metering.add(self._key(request), UsageRecord(num_requests=1))

    def came_to_choose(self, tenant_id: str, key_id: str) -> None:
        """A client asked which adapter is nearest, and for nothing else."""
        key = LedgerKey(self._minute(), tenant_id, key_id, _shortened(self._base_name), "", "embeddings")
        self.metering.add(key, UsageRecord(num_requests=1))

    def ended(self, request: GenerateRequest, request_usage: RequestUsage) -> None:
        """A sequence has ended. One of a sender that counts itself (`key_id` None) is not counted here."""
        if request.key_id is None:
            return
        key = self._key(request)
        used = Usage(request_usage.prompt_tokens, request_usage.cached_tokens, request_usage.completion_tokens)
        models = paid_models(request.requested_adapter, self._base_name)
        charge = UsageRecord(**request_usage._asdict(), cost_nanos=self._prices.of(models, used))
        self.metering.add(key, charge)

    def loaded(self, ref: AdapterRef, size_bytes: int) -> None:
        """An adapter was written to a device before anybody asked for it: its owner's cost."""
        if size_bytes:
            key = LedgerKey(self._minute(), ref.tenant_id, "", _shortened(ref.name), ref.digest, "completions")
            self.metering.add(key, UsageRecord(num_loads=1, load_bytes=size_bytes))

    def _key(self, request: GenerateRequest) -> LedgerKey:
        adapter = request.requested_adapter
        model, digest = (self._base_name, "") if adapter is None else (adapter.name, adapter.digest)
        kind: RouteKind = "completions" if request.pooling is None else "embeddings"
        return LedgerKey(self._minute(), request.tenant_id, request.key_id or "", _shortened(model), digest, kind)

    def _minute(self) -> int:
        return int(self._clock()) // 60


def _shortened(model: str) -> str:
    """As the ledger has room for: the name of several adapters at once has no end. The digest tells them apart."""
    return model if len(model) <= MAX_MODEL_CHARS else model[: MAX_MODEL_CHARS - 1] + "…"
