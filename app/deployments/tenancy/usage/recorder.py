"""Recorder of requests and consumption as rows for the ledger.

An ingress records that a request arrived. The engine where a sequence ended records all that was computed and held for
it, so tenants' sums equal engines' sums, whatever becomes of ingresses.
"""

from __future__ import annotations

from collections.abc import Callable

from app.deployments.tenancy.usage.flusher import LedgerKey, RouteKind, UsageFlusher, UsageRecord
from app.deployments.tenancy.usage.prices import Prices, paid_models
from app.engine.adapters.card import AdapterRef
from app.engine.request import GenerateRequest, RequestUsage, Usage

#: Longest model name in the ledger.
MAX_MODEL_CHARS = 128


class UsageRecorder:
    """One per process. `clock` gives Unix time; `base_name` is the base model's."""

    def __init__(self, flusher: UsageFlusher, prices: Prices, base_name: str, clock: Callable[[], float]) -> None:
        self.flusher = flusher
        self._prices = prices
        self._base_name = base_name
        self._clock = clock

    def record_request(self, request: GenerateRequest) -> None:
        """Count a client's admitted request; `request` is the first of its sequences."""
        self.flusher.add(self._key(request), UsageRecord(num_requests=1))

    def record_routing_request(self, tenant_id: str, key_id: str) -> None:
        """Count a request that only asked which adapter matches best."""
        key = LedgerKey(self._minute(), tenant_id, key_id, _shorten(self._base_name), "", "embeddings")
        self.flusher.add(key, UsageRecord(num_requests=1))

    def record_usage(self, request: GenerateRequest, request_usage: RequestUsage) -> None:
        """Record a sequence that ended. Skipped for senders that record it themselves (`key_id` None)."""
        if request.key_id is None:
            return
        key = self._key(request)
        used = Usage(request_usage.prompt_tokens, request_usage.cached_tokens, request_usage.completion_tokens)
        models = paid_models(request.requested_adapter, self._base_name)
        charge = UsageRecord(**request_usage._asdict(), cost_nanos=self._prices.of(models, used))
        self.flusher.add(key, charge)

    def record_load(self, ref: AdapterRef, size_bytes: int) -> None:
        """Charge an adapter's owner for a load to a device that no request caused."""
        if size_bytes:
            key = LedgerKey(self._minute(), ref.tenant_id, "", _shorten(ref.name), ref.digest, "completions")
            self.flusher.add(key, UsageRecord(num_loads=1, load_bytes=size_bytes))

    def _key(self, request: GenerateRequest) -> LedgerKey:
        adapter = request.requested_adapter
        model, digest = (self._base_name, "") if adapter is None else (adapter.name, adapter.digest)
        kind: RouteKind = "completions" if request.pooling is None else "embeddings"
        return LedgerKey(self._minute(), request.tenant_id, request.key_id or "", _shorten(model), digest, kind)

    def _minute(self) -> int:
        return int(self._clock()) // 60


def _shorten(model: str) -> str:
    """Cut a name to the ledger's column: names of combinations are unbounded. The digest distinguishes them."""
    return model if len(model) <= MAX_MODEL_CHARS else model[: MAX_MODEL_CHARS - 1] + "…"
