"""What an engine has done and holds: one frozen snapshot of it.

Any thread may ask an engine for its `EngineStats`; the numbers are each true, and true together when the engine is
idle. Counting is `meter`'s. Turning them into metrics is left to whoever serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
    Steps took `base_s + deltas_s` without their writes: what the base and what adapters took of it (`StepProfile`).
    `compile_s`: what making kernels, programs or graphs took until now (`Backend.compile_s`).
    `cached_prefixes`: names of what prompts began with that is cached (`prefix_key`), the last used at the end.
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
    cached_prefixes: tuple[bytes, ...] = ()
