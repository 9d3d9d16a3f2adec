"""What an engine has done and holds: counters while it runs, and one frozen snapshot of them.

In: events, from the engine's thread. Out: `EngineStats`, which any thread may ask for; its numbers
are each true, and true together when the engine is idle. Tenants beyond `MAX_TENANTS` are counted
together under `OTHER_TENANTS`, so the sums over tenants are always the totals.
Turning them into metrics is left to whoever serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from app.engine.request import Consumption

MAX_TENANTS = 256
OTHER_TENANTS = "~other"
#: One step of so many is part of the sample, and the line is fitted anew after so many of those.
SAMPLE_EVERY, FIT_EVERY = 4, 16
#: Those of so many sampled steps before count half.
HALF_LIFE = 128
#: Of a step: itself, its tokens, rank rows that are read, and tokens times rows of their adapter.
NUM_FEATURES = 4


class ResidentAdapter(NamedTuple):
    """An adapter on the device. `num_refs` running sequences hold it there; it needs `num_needed` of its rank rows."""

    digest: str
    num_needed: int
    row_start: int
    num_rows: int
    num_refs: int
    extra_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Totals of one tenant. `adapter_write_bytes` were written on behalf of its requests; what those held is told when
    they have ended."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    adapter_write_bytes: int
    rank_row_ms: int = 0
    kv_block_ms: int = 0


class TenantService(NamedTuple):
    """What the fair queue has counted: each tenant's service in all, in prompt tokens by weight, and who waits."""

    served: dict[str, float]
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Totals count since the engine started.

    `num_blocks_cached` of the free blocks hold a reusable prefix. `num_tokens_computed` went
    through the model, recomputed ones included; `num_tokens_generated` were sent. `num_aborted`
    requests ended early: aborted, or failed with their adapter. `num_adapter_hits` of the sequences that started
    with an adapter found it on the device, `num_adapter_misses` did not; writes took `adapter_write_s` in all.
    `rank_row_ms`, `kv_block_ms`: rows and blocks that requests which have ended had referred to, times milliseconds.
    `num_guessed` tokens were verified beside those that had to be computed, and `num_guessed_right` of them were kept.
    `service_gap`: how far the service of tenants that wait is apart, by weight and in prompt tokens.
    An engine that holds adapters in another form than rank rows has none: `num_rank_rows` is 0.
    `num_kv_tokens`: what all KV blocks together hold, and no request may exceed; 0 for a model without KV memory.
    Steps took `base_s + deltas_s` without their writes: what the base and what adapters took of it (`StepSplit`).
    `compile_s`: what making kernels, programs or graphs took until now (`Backend.compile_s`).
    `cached_heads`: names of what prompts began with that is cached (`prompt_head`), the last used at the end.
    """

    num_waiting: int
    num_running: int
    num_blocks: int
    num_blocks_free: int
    num_blocks_cached: int
    num_rank_rows: int
    num_rank_rows_free: int
    residents: tuple[ResidentAdapter, ...]
    num_steps: int
    num_tokens_computed: int
    num_tokens_generated: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_adapter_hits: int
    num_adapter_misses: int
    num_adapter_writes: int
    num_adapter_write_bytes: int
    adapter_write_s: float
    num_adapter_evictions: int
    num_finished: int
    num_aborted: int
    tenants: dict[str, TenantStats]
    rank_row_ms: int = 0
    kv_block_ms: int = 0
    service_gap: float = 0.0
    num_kv_tokens: int = 0
    num_guessed: int = 0
    num_guessed_right: int = 0
    base_s: float = 0.0
    deltas_s: float = 0.0
    compile_s: float = 0.0
    cached_heads: tuple[bytes, ...] = ()


class _Tenant:
    __slots__ = (
        "adapter_write_bytes", "cached_tokens", "completion_tokens", "kv_block_ms", "prompt_tokens", "rank_row_ms"
    )  # fmt: skip

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.adapter_write_bytes = 0
        self.rank_row_ms = self.kv_block_ms = 0


class EngineMeter:
    """Counters, written by the engine's thread only. `now_s` is when its present step began, by the engine's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rank_row_ms = 0
        self.kv_block_ms = 0
        self.num_steps = 0
        self.num_tokens_computed = 0
        self.num_tokens_generated = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_adapter_hits = 0
        self.num_adapter_misses = 0
        self.num_adapter_writes = 0
        self.num_adapter_write_bytes = 0
        self.adapter_write_s = 0.0
        self.num_finished = 0
        self.num_aborted = 0
        self.num_guessed = self.num_guessed_right = 0
        self._tenants: dict[str, _Tenant] = {}

    def admitted(self, tenant_id: str, num_prompt: int, num_cached: int) -> None:
        """A request starts for the first time."""
        self.num_prompt_tokens += num_prompt
        self.num_cached_tokens += num_cached
        tenant = self._tenant(tenant_id)
        tenant.prompt_tokens += num_prompt
        tenant.cached_tokens += num_cached

    def adapter_granted(self, *, is_hit: bool) -> None:
        """A sequence starts with an adapter that was on the device, or has to be written first."""
        self.num_adapter_hits += is_hit
        self.num_adapter_misses += not is_hit

    def adapter_written(self, tenant_id: str, size_bytes: int) -> None:
        self.num_adapter_writes += 1
        self.num_adapter_write_bytes += size_bytes
        self._tenant(tenant_id).adapter_write_bytes += size_bytes

    def generated(self, tenant_id: str) -> None:
        """One token was produced and sent."""
        self.num_tokens_generated += 1
        self._tenant(tenant_id).completion_tokens += 1

    def guessed(self, num_guessed: int, num_right: int) -> None:
        """Guesses were verified, and so many of them were right."""
        self.num_guessed += num_guessed
        self.num_guessed_right += num_right

    def ended(self, tenant_id: str, consumption: Consumption) -> None:
        """A request has ended: what it held counts now."""
        self.rank_row_ms += consumption.rank_row_ms
        self.kv_block_ms += consumption.kv_block_ms
        tenant = self._tenant(tenant_id)
        tenant.rank_row_ms += consumption.rank_row_ms
        tenant.kv_block_ms += consumption.kv_block_ms

    def tenants(self) -> dict[str, TenantStats]:
        return {tenant_id: _told(t) for tenant_id, t in self._tenants.copy().items()}

    def _tenant(self, tenant_id: str) -> _Tenant:
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            if len(self._tenants) >= MAX_TENANTS:
                tenant_id = OTHER_TENANTS
            tenant = self._tenants.setdefault(tenant_id, _Tenant())
        return tenant


def _told(tenant: _Tenant) -> TenantStats:
    return TenantStats(
        tenant.prompt_tokens,
        tenant.cached_tokens,
        tenant.completion_tokens,
        tenant.adapter_write_bytes,
        tenant.rank_row_ms,
        tenant.kv_block_ms,
    )


class StepSplit:
    """What of the steps' time is the base's, and what the adapters'. Written by the engine's thread only.

    A step is one call in which base products and deltas take turns thread by thread, so no clock tells them apart: the
    deltas' part is that of a line fitted to a sample of the last steps. It costs a few additions a step. As long as
    steps do not differ in their adapters, no line can tell, and all of the time is the base's.
    """

    def __init__(self) -> None:
        self.base_s = self.deltas_s = 0.0
        self._products = np.zeros((NUM_FEATURES, NUM_FEATURES))  # of features with each other, fading
        self._targets = np.zeros(NUM_FEATURES)  # of features with the time
        self._num_steps = 0
        self._row_s = self._token_row_s = 0.0

    def observe(self, num_tokens: int, num_rows: int, num_token_rows: int, time_s: float) -> None:
        """A step. num_rows: rank rows of its adapters, each counted once; num_token_rows: the same for every token."""
        self._num_steps += 1
        if self._num_steps % SAMPLE_EVERY == 0:
            self._take((1.0, num_tokens, num_rows, num_token_rows), time_s)
        deltas_s = min(num_rows * self._row_s + num_token_rows * self._token_row_s, time_s)
        self.deltas_s += deltas_s
        self.base_s += time_s - deltas_s

    def _take(self, values: tuple[float, ...], time_s: float) -> None:
        fade, features = 0.5 ** (1 / HALF_LIFE), np.array(values)
        self._products = fade * self._products + np.outer(features, features)
        self._targets = fade * self._targets + time_s * features
        if self._num_steps % (SAMPLE_EVERY * FIT_EVERY) == 0:
            self._fit()

    def _fit(self) -> None:
        """Least squares without negative times: what the others explain, or what comes out below 0, is left out."""
        scale = np.sqrt(np.maximum(np.diag(self._products), 1e-30))
        products, targets = self._products / np.outer(scale, scale), self._targets / scale
        kept, found = [*range(NUM_FEATURES)], np.zeros(NUM_FEATURES)
        while kept:
            part, _, rank, _ = np.linalg.lstsq(products[np.ix_(kept, kept)], targets[kept], rcond=1e-6)
            if rank < len(kept):
                kept.pop()  # the adapters' first: what could be the base's is the base's
            elif (part < 0).any():
                kept.pop(int(np.argmin(part)))
            else:
                found[kept] = part / scale[kept]
                break
        self._row_s, self._token_row_s = float(found[2]), float(found[3])
