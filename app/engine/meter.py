"""Counters of a running engine, and the snapshot that is made of them.

Only the engine's thread writes them. Tenants beyond `MAX_TENANTS` are counted together under `OTHER_TENANTS`, so the
sums over tenants are always the totals.
"""

from __future__ import annotations

import numpy as np

from app.engine.adapters.card import AdapterCard
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.block_pool import BlockPool
from app.engine.request import RequestUsage
from app.engine.stats import EngineStats, ResidentAdapter, TenantStats

MAX_TENANTS = 256
OTHER_TENANTS = "~other"
#: One step of so many is part of the sample, and the line is fitted anew after so many of those.
SAMPLE_EVERY, FIT_EVERY = 4, 16
#: Those of so many sampled steps before count half.
HALF_LIFE = 128
#: Of a step: itself, its tokens, rank rows that are read, and tokens times rows of their adapter.
NUM_FEATURES = 4


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

    def ended(self, tenant_id: str, consumption: RequestUsage) -> None:
        """A request has ended: what it held counts now."""
        self.rank_row_ms += consumption.rank_row_ms
        self.kv_block_ms += consumption.kv_block_ms
        tenant = self._tenant(tenant_id)
        tenant.rank_row_ms += consumption.rank_row_ms
        tenant.kv_block_ms += consumption.kv_block_ms

    def stats(
        self,
        blocks: BlockPool,
        adapters: AdapterPool,
        split: StepProfile,
        *,
        num_live: int,
        num_running: int,
        merged: AdapterCard | None,
        service_gap: float,
        compile_s: float,
    ) -> EngineStats:
        """A snapshot of an engine with these pools. An adapter that is `merged` is resident for good, without rows."""
        residents = adapters.residents()
        if merged is not None:
            residents += (ResidentAdapter(merged.digest, merged.max_rank, 0, 0, 0),)
        return EngineStats(
            num_waiting=max(0, num_live - num_running),
            num_running=num_running,
            num_blocks=blocks.num_blocks,
            num_blocks_free=blocks.num_free,
            num_blocks_cached=blocks.num_cached,
            num_rank_rows=adapters.limits.num_rows,
            num_rank_rows_free=adapters.num_rows_free,
            residents=residents,
            num_steps=self.num_steps,
            num_tokens_computed=self.num_tokens_computed,
            num_tokens_generated=self.num_tokens_generated,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_adapter_hits=self.num_adapter_hits,
            num_adapter_misses=self.num_adapter_misses,
            num_adapter_writes=self.num_adapter_writes,
            num_adapter_write_bytes=self.num_adapter_write_bytes,
            adapter_write_s=self.adapter_write_s,
            num_adapter_evictions=adapters.num_evictions,
            num_finished=self.num_finished,
            num_aborted=self.num_aborted,
            tenants=self.tenants(),
            rank_row_ms=self.rank_row_ms,
            kv_block_ms=self.kv_block_ms,
            service_gap=service_gap,
            num_kv_tokens=blocks.num_blocks * blocks.block_size,
            num_guessed=self.num_guessed,
            num_guessed_right=self.num_guessed_right,
            base_s=split.base_s,
            deltas_s=split.deltas_s,
            compile_s=compile_s,
            cached_prefixes=blocks.cached_prefixes,
        )

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


class StepProfile:
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
