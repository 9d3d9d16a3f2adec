"""The adapter methods that both CPU backends share: rank rows and extra weights.

The engine chooses slots and rows. A write is complete when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from app.engine.adapters.adapter import LoraAdapter
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.cpu.adapter_layout import AdapterLayoutCache
from app.engine.cpu.extra_weights import AdapterExtras
from app.engine.cpu.lora_memory import LoraMemory
from app.kernels.machine.jit import compile_seconds
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.sgmv.cpu import RANK_PANEL


def limits_of(
    config: EngineConfig, num_kv_blocks: int, layouts: AdapterLayoutCache, *, num_draft_rows: int = 0
) -> BackendLimits:
    """The limits of a CPU backend. Runs of rank rows begin anywhere: here a row is memory, not a table row."""
    return BackendLimits(
        num_kv_blocks=num_kv_blocks, block_size=config.block_size,
        lora_pool_rows=config.lora_pool_rows // RANK_PANEL * RANK_PANEL, rank_alignment=1, max_loras=config.max_loras,
        extra_weights_bytes=config.extra_weights_bytes, can_embed=True, num_draft_rows=num_draft_rows,
        rank_rows_of=lambda adapter: layouts.of(adapter).num_rows,
    )  # fmt: skip


class AdapterBackend:
    """The methods of `Backend` that write and release adapters."""

    _team: ThreadTeam
    _rows: LoraMemory
    _layouts: AdapterLayoutCache
    _extras: AdapterExtras

    @property
    def compile_s(self) -> float:
        """See `Backend.compile_s`; counted for the whole process."""
        return compile_seconds()

    def prepare_adapter(self, adapter: LoraAdapter) -> None:
        """See `Backend.prepare_adapter`."""
        self._layouts.of(adapter)

    def write_adapter(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """See `Backend.write_adapter`. Raises AdapterMismatch for a module that this model does not have."""
        self._extras.write(adapter_slot, adapter)
        self._rows.write(self._team, adapter_slot, row_start, self._layouts.of(adapter))

    def is_ready(self, adapter_slot: int) -> bool:  # noqa: ARG002
        """See `Backend.is_ready`: always, a write is complete when it returns."""
        return True

    def release_adapter(self, adapter_slot: int) -> None:
        """See `Backend.release_adapter`."""
        self._extras.release(adapter_slot)
        self._rows.release(adapter_slot)

    def trim_memory(
        self,
        kept_blocks: Collection[int],  # noqa: ARG002
        kept_rows: Collection[tuple[int, int]],
        should_stop: Callable[[], bool],
    ) -> bool:
        """See `Backend.trim_memory`: rank rows."""
        self._rows.trim(kept_rows, should_stop)
        return True
