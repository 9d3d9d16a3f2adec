"""A frozen snapshot of what an engine holds and has done.

Any thread may take one; each number is true by itself, and all of them together while the engine is idle.
`app.engine.meter` does the counting; the replica turns snapshots into metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ResidentAdapter(NamedTuple):
    """An adapter on the device. `num_refs` running sequences use it; it needs `num_needed` of its rank rows."""

    digest: str
    num_needed: int
    row_start: int
    num_rows: int
    num_refs: int
    extra_bytes: int = 0


class TenantService(NamedTuple):
    """The fair queue's totals: each tenant's service in prompt tokens by weight, and the waiting tenants."""

    served: dict[str, float]
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Totals count since the engine started.

    `num_blocks_cached` of the free blocks hold a reusable prefix. `num_tokens_computed` went through the model,
    recomputed ones included; `num_tokens_generated` were sent. `num_aborted` requests ended early: aborted, or failed
    with their adapter. `num_adapter_hits` sequences found their adapter on the device when they started,
    `num_adapter_misses` did not; writes took `adapter_write_s` in all. `rank_row_ms`, `kv_block_ms`: rows and blocks
    that ended requests had referenced, times milliseconds. `num_draft_tokens` were verified, and `num_accepted_tokens`
    of them were kept. `service_gap`: the spread of waiting tenants' service, by weight and in prompt tokens.
    `num_rank_rows` is 0 for an engine that holds adapters in another form. `num_kv_tokens`: the capacity of all KV
    blocks, which no request may exceed; 0 for a model without KV memory. Steps took `base_s + lora_s` without their
    writes: the parts of the base model and of adapters (`StepProfile`). `compile_s`: see `Backend.compile_s`.
    `cached_prefixes`: keys of cached prefixes (`prefix_key`), the last used at the end. `engine`: what computes: the
    device section's name, or another program's name and version.
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
    rank_row_ms: int = 0
    kv_block_ms: int = 0
    service_gap: float = 0.0
    num_kv_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    base_s: float = 0.0
    lora_s: float = 0.0
    compile_s: float = 0.0
    cached_prefixes: tuple[bytes, ...] = ()
    engine: str = ""
