"""The one interface between engine and device. A backend decides nothing.

It owns weights, KV memory and adapter tables; it writes rows where it is told and computes the batch
it is given. NumPy in, NumPy out. One thread calls it, but for `prepare_adapter`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from app.engine.adapters.adapter import LoraAdapter
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.models.spec import ModelSpec


def counted_extra_bytes(adapter: LoraAdapter) -> int:
    """What most devices hold of an adapter beside its rank rows: as it was counted when it was read."""
    return adapter.card.extra_bytes


def counted_rank_rows(adapter: LoraAdapter) -> int:
    """What an adapter needs where a rank row has one row of every module, changed or not: its largest rank."""
    return adapter.card.max_rank


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """What the engine may use: sizes fixed when the backend was built.

    `rank_alignment`: an adapter's run of rank rows starts at a multiple of it and its length is
    this times a power of two. `max_loras` counts slot 0, the base. `extra_weights_bytes`: the most
    that resident adapters may hold beside their rank rows (`AdapterCard.extra_bytes`). `takes_bfloat16`: whether
    `write_adapter` is given matrices in bfloat16 as they are, or in float32 only. `can_embed`: whether `forward` takes
    batches with `pooling`. `num_draft_rows`: so many rows beside one of each sequence may draw in a step, several of
    one sequence, and each has the bits that it would have in a step of its own; 0: none. `extra_bytes_of`: what an
    adapter holds beside its rank rows on this device. `rank_rows_of`: how many rank rows it needs, at least 1 and at
    most its largest rank rounded up to `EngineConfig.rank_alignment`; AdapterMismatch as `prepare_adapter`. Any thread.
    """

    num_kv_blocks: int
    block_size: int
    lora_pool_rows: int
    rank_alignment: int
    max_loras: int
    extra_weights_bytes: int = 0
    takes_bfloat16: bool = False
    can_embed: bool = False
    num_draft_rows: int = 0
    extra_bytes_of: Callable[[LoraAdapter], int] = counted_extra_bytes
    rank_rows_of: Callable[[LoraAdapter], int] = counted_rank_rows


class Backend(Protocol):
    """Device memory and arithmetic for one base model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def limits(self) -> BackendLimits: ...

    @property
    def compile_s(self) -> float:
        """Seconds in which kernels, programs or graphs were made until now; any thread may ask."""
        ...

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        """Any thread, before `write_adapter`: work out what that would otherwise, while a step waits for it.

        Raises AdapterMismatch for a module this decoder does not have.
        """
        ...

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """Copy an adapter into rows [row_start, row_start + rows) and point `adapter_slot` at them.

        The engine guarantees that no sequence in flight uses the slot or the rows, and
        that the run has as many rows as `BackendLimits.rank_rows_of` says. Takes effect with the next `forward`.
        """
        ...

    def is_ready(self, adapter_slot: int) -> bool:
        """Whether a step with the slot's adapter would start at once; otherwise it waits for the end of its write.

        Raises AdapterWriteFailed, every time it is asked, if that write failed.
        """
        ...

    def release_adapter(self, adapter_slot: int) -> None:
        """Free what the slot's adapter held beside its rank rows: it has been evicted. Nothing in flight uses it."""
        ...

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the model over the batch, write K and V in place, draw a token for each sample row.

        Raises AdapterWriteFailed, before anything is computed, if a write it waited for failed; `is_ready` raises
        for that slot from then on.
        """
        ...

    def close(self) -> None:
        """Release device memory. The backend is unusable afterwards."""
        ...
