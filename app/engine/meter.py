"""Counters of a running engine, and the snapshot made of them.

Only the engine's thread writes them. What each tenant used is in its requests' `RequestUsage`.
"""

from __future__ import annotations

import numpy as np

from app.engine.adapters.card import AdapterCard
from app.engine.pools.adapter_pool import AdapterPool
from app.engine.pools.block_pool import BlockPool
from app.engine.request import RequestUsage
from app.engine.sequence import Sequence
from app.engine.stats import EngineStats, ResidentAdapter

#: One step of so many is sampled, and the line is fitted again after so many samples.
SAMPLE_EVERY, FIT_EVERY = 4, 16
#: A sample's weight halves after so many later ones.
HALF_LIFE = 128
#: Features of a step: 1, its tokens, its adapters' rank rows, and the sum over tokens of their adapter's rows.
NUM_FEATURES = 4


class EngineMeter:
    """Counters, written by the engine's thread only. `now_s`: when its current step began, by the engine's clock."""

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
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self._step_profile = StepProfile()

    def count_admission(self, num_prompt: int, num_cached: int) -> None:
        """A request starts for the first time."""
        self.num_prompt_tokens += num_prompt
        self.num_cached_tokens += num_cached

    def count_adapter_use(self, *, is_hit: bool) -> None:
        """A sequence starts with an adapter that was on the device, or has to be written first."""
        self.num_adapter_hits += is_hit
        self.num_adapter_misses += not is_hit

    def count_adapter_write(self, size_bytes: int) -> None:
        self.num_adapter_writes += 1
        self.num_adapter_write_bytes += size_bytes

    def count_draft_tokens(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Draft tokens were verified, and so many of them accepted."""
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted

    def count_usage(self, request_usage: RequestUsage) -> None:
        """A request has ended with this usage."""
        self.rank_row_ms += request_usage.rank_row_ms
        self.kv_block_ms += request_usage.kv_block_ms

    def observe_step(self, items: list[tuple[Sequence, int]], time_s: float) -> None:
        """A step has computed so many tokens of each of these sequences."""
        ranks = {sequence.adapter_slot: sequence.rank for sequence, _ in items}
        num_tokens = sum(count for _, count in items)
        num_token_rows = sum(count * sequence.rank for sequence, count in items)
        self._step_profile.observe(num_tokens, sum(ranks.values()), num_token_rows, time_s)

    def stats(
        self,
        blocks: BlockPool,
        adapters: AdapterPool,
        *,
        num_live: int,
        num_running: int,
        merged: AdapterCard | None,
        service_gap: float,
        compile_s: float,
        engine: str,
    ) -> EngineStats:
        """A snapshot of an engine with these pools. A `merged` adapter is always resident, without rows."""
        residents = adapters.residents()
        if merged is not None:
            residents += (ResidentAdapter(merged.digest, merged.max_rank, 0, 0, 0),)
        return EngineStats(
            num_waiting=max(0, num_live - num_running), num_running=num_running, num_blocks=blocks.num_blocks,
            num_blocks_free=blocks.num_free, num_blocks_cached=blocks.num_cached,
            num_rank_rows=adapters.limits.num_rows, num_rank_rows_free=adapters.num_rows_free, residents=residents,
            num_steps=self.num_steps, num_tokens_computed=self.num_tokens_computed,
            num_tokens_generated=self.num_tokens_generated, num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens, num_preemptions=self.num_preemptions,
            num_adapter_hits=self.num_adapter_hits, num_adapter_misses=self.num_adapter_misses,
            num_adapter_writes=self.num_adapter_writes, num_adapter_write_bytes=self.num_adapter_write_bytes,
            adapter_write_s=self.adapter_write_s, num_adapter_evictions=adapters.num_evictions,
            num_finished=self.num_finished, num_aborted=self.num_aborted,
            rank_row_ms=self.rank_row_ms, kv_block_ms=self.kv_block_ms, service_gap=service_gap,
            num_kv_tokens=blocks.num_blocks * blocks.block_size, num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens, base_s=self._step_profile.base_s,
            lora_s=self._step_profile.lora_s, compile_s=compile_s, cached_prefixes=blocks.cached_prefixes,
            engine=engine,
        )  # fmt: skip


class StepProfile:
    """Splits the steps' time into the base model's part and the adapters'. Written by the engine's thread only.

    A step is one call in which base products and LoRA products alternate thread by thread, so no clock can separate
    them: the adapters' part comes from a line fitted to a sample of recent steps, at the cost of a few additions per
    step. While all steps use adapters alike, no line can be fitted, and all of the time is the base model's.
    """

    def __init__(self) -> None:
        self.base_s = self.lora_s = 0.0
        self._products = np.zeros((NUM_FEATURES, NUM_FEATURES))  # sums of products of features, decaying
        self._targets = np.zeros(NUM_FEATURES)  # sums of features times the step's time, decaying
        self._num_steps = 0
        self._row_s = self._token_row_s = 0.0

    def observe(self, num_tokens: int, num_rows: int, num_token_rows: int, time_s: float) -> None:
        """Add a step. num_rows: its adapters' rank rows, each counted once; num_token_rows: summed over tokens."""
        self._num_steps += 1
        if self._num_steps % SAMPLE_EVERY == 0:
            self._add_sample((1.0, num_tokens, num_rows, num_token_rows), time_s)
        lora_s = min(num_rows * self._row_s + num_token_rows * self._token_row_s, time_s)
        self.lora_s += lora_s
        self.base_s += time_s - lora_s

    def _add_sample(self, values: tuple[float, ...], time_s: float) -> None:
        decay, features = 0.5 ** (1 / HALF_LIFE), np.array(values)
        self._products = decay * self._products + np.outer(features, features)
        self._targets = decay * self._targets + time_s * features
        if self._num_steps % (SAMPLE_EVERY * FIT_EVERY) == 0:
            self._fit()

    def _fit(self) -> None:
        """Least squares without negative times: redundant features and those with a negative time are left out."""
        scale = np.sqrt(np.maximum(np.diag(self._products), 1e-30))
        products, targets = self._products / np.outer(scale, scale), self._targets / scale
        used, seconds = [*range(NUM_FEATURES)], np.zeros(NUM_FEATURES)
        while used:
            part, _, rank, _ = np.linalg.lstsq(products[np.ix_(used, used)], targets[used], rcond=1e-6)
            if rank < len(used):
                used.pop()  # the adapters' features come last: in doubt the time is the base model's
            elif (part < 0).any():
                used.pop(int(np.argmin(part)))
            else:
                seconds[used] = part / scale[used]
                break
        self._row_s, self._token_row_s = float(seconds[2]), float(seconds[3])
