"""The interface between the engine and a device: memory and arithmetic, no decisions.

A backend owns weights, KV memory and adapter tables, writes the rows it is given and computes the batch it is given.
NumPy in, NumPy out. One thread calls it, except for `prepare_adapter`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from app.engine.adapters.adapter import LoraAdapter
from app.engine.batch import ForwardBatch, ForwardOutput
from app.engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """Sizes that the engine may use, fixed when the backend is built.

    `rank_alignment`: an adapter's run of rank rows starts at a multiple of it, and its length is this times a power of
    two. `max_loras` counts slot 0, the base. `extra_weights_bytes`: the most that resident adapters' extra weights may
    take (`AdapterCard.extra_bytes`). `can_embed`: `forward` accepts batches with `pooling`. `num_draft_rows`: the draft
    tokens of a step, in rows beyond one per sequence; each row has the bits of a step of its own; 0: none.
    `extra_bytes_of`: an adapter's extra weights on this device. `rank_rows_of`: the rank rows it needs, at least 1 and
    at most its largest rank rounded up to `EngineConfig.rank_alignment`; AdapterMismatch as in `prepare_adapter`. Both
    may be called by any thread.
    """

    num_kv_blocks: int
    block_size: int
    lora_pool_rows: int
    rank_alignment: int
    max_loras: int
    extra_weights_bytes: int = 0
    can_embed: bool = False
    num_draft_rows: int = 0
    extra_bytes_of: Callable[[LoraAdapter], int] = lambda adapter: adapter.card.extra_bytes
    rank_rows_of: Callable[[LoraAdapter], int] = lambda adapter: adapter.card.max_rank


class Backend(Protocol):
    """Device memory and arithmetic for one base model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def limits(self) -> BackendLimits: ...

    @property
    def compile_s(self) -> float:
        """Seconds spent on making kernels, programs or graphs so far. Any thread."""
        ...

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        """Do the work of `write_adapter` that needs no device in advance, so that no step waits for it. Any thread.

        Raises AdapterMismatch for a module that this model does not have.
        """
        ...

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """Copy an adapter into rows [row_start, row_start + rows) and point `adapter_slot` at them.

        The engine guarantees that no running sequence uses the slot or the rows, and that the run has as many rows as
        `BackendLimits.rank_rows_of` says. Takes effect with the next `forward`.
        """
        ...

    def is_ready(self, adapter_slot: int) -> bool:
        """Whether a step with this slot would start at once; otherwise it waits for the end of the slot's write.

        Raises AdapterWriteFailed, at every call, if that write failed.
        """
        ...

    def release_adapter(self, adapter_slot: int) -> None:
        """Free the extra weights of an evicted adapter. No running sequence uses it."""
        ...

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Run the model over the batch, write K and V in place and draw a token for each sample row.

        Raises AdapterWriteFailed, before anything is computed, if a write it waited for failed; from then on `is_ready`
        raises for that slot.
        """
        ...

    def trim_memory(
        self, kept_blocks: Collection[int], kept_rows: Collection[tuple[int, int]], should_stop: Callable[[], bool], /
    ) -> bool:
        """Give back the system's memory of other KV blocks and rank rows (first, end); False if this device cannot.

        No sequence runs. `should_stop` is asked often, so that the next step need not wait.
        """
        ...

    def close(self) -> None:
        """Release device memory. The backend is unusable afterwards."""
        ...
