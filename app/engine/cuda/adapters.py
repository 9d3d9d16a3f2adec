"""The device's copies of adapters, written in the background while decoding goes on.

One writer thread rounds matrices into pinned buffers, sends them on its own stream, and then updates the slot's starts
and ranks in the tables. No step reads a slot before `wait` has ordered it after the end of the slot's write. Pieces are
a few MiB, so that a step's own copies get through.

`lora_tables` and, for experts, `moe_lora_tables` decide where each matrix lies.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.adapters.adapter import LoraAdapter, Matrix, to_float32, unknown_module
from app.engine.cuda.lora_tables import Layout, LoraTables
from app.engine.cuda.moe_lora_tables import ExpertLayout, MoeLoraTables
from app.engine.errors import AdapterWriteFailed
from app.engine.models.spec import ModelSpec
from app.kernels.cast_bf16.cpu import round_rows, tasks_of
from app.kernels.lora_rows import ExpertRows, RankRows

#: Bytes of a pinned buffer, and how many there are: one is filled while another is sent.
_PIECE_BYTES, _NUM_BUFFERS = 2 << 20, 3
#: Threads that round rows; a single one reads host memory slower than a device accepts it.
_NUM_ROUNDING = 4


class _Buffer:
    """A pinned staging buffer, as a tensor and as the bits of its numbers."""

    def __init__(self, size: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.memory = torch.empty(size, dtype=dtype, pin_memory=pinned)
        same_size = torch.int16 if dtype.itemsize == 2 else torch.int32
        self.bits = self.memory.view(same_size).numpy().view(np.uint16 if dtype.itemsize == 2 else np.uint32)
        self.sent: torch.cuda.Event | None = None


class AdapterTables:
    """LoRA tables of every linear module and of experts, written in the background."""

    def __init__(
        self, spec: ModelSpec, num_rows: int, max_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raises CheckpointError for layers that differ in anything but their feed-forward."""
        self._device = device
        self._singles = LoraTables(spec, num_rows, max_slots, device, dtype)
        self._layouts: WeakKeyDictionary[LoraAdapter, Layout] = WeakKeyDictionary()
        self._experts = MoeLoraTables(spec, max_slots, device, dtype)
        self.max_ranks = np.zeros(max_slots, np.int64)  # on the host: the largest rank of a slot's adapter
        self._pending: dict[int, Future[torch.cuda.Event | None]] = {}
        self._writer = ThreadPoolExecutor(1, "adapter-writer")
        self._round_pool = ThreadPoolExecutor(_NUM_ROUNDING, "adapter-rounding")
        size = max(1, _PIECE_BYTES // dtype.itemsize)
        on_gpu = device.type == "cuda"
        self._buffers = [_Buffer(size, dtype, pinned=on_gpu) for _ in range(_NUM_BUFFERS if num_rows else 0)]
        for buffer in self._buffers[:1]:
            round_rows(tasks_of([]), 0, 0, 1, buffer.bits)  # compiled now, not when the first adapter is written
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def check(self, adapter: LoraAdapter) -> None:
        """Raises AdapterMismatch for a module that is not in the tables."""
        for key in adapter.weights:
            if not (self._experts.has(key) or self._singles.has(key)):
                raise unknown_module(key)

    def num_rows(self, adapter: LoraAdapter) -> int:
        """Number of rank rows that the adapter needs. Any thread. Raises AdapterMismatch as `check` does."""
        return self._layout(adapter).num_rows

    def rows(self, layer: int) -> dict[str, RankRows]:
        """The tables of one layer's linear modules, by name; their addresses never change."""
        return self._singles.rows(layer)

    def expert_rows(self, layer: int) -> dict[str, ExpertRows]:
        """The tables of one layer's expert modules, by name; empty for a layer without experts."""
        return self._experts.rows(layer)

    def write(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """Start writing an adapter. The write waits for the steps launched so far: one without a token to sample may
        still run.

        Raises torch.OutOfMemoryError if there is no room for the rows of experts.
        """
        self.release(adapter_slot)
        layout, expert_layout = self._layout(adapter), self._experts.take(adapter_slot, adapter)
        launched = None
        if self._stream is not None:
            launched = torch.cuda.current_stream(self._device).record_event()
        self._pending[adapter_slot] = self._writer.submit(
            self._write, adapter_slot, row_start, layout, expert_layout, launched
        )
        of_experts = (pair.rank for key, pair in adapter.weights.items() if key.expert is not None)
        self.max_ranks[adapter_slot] = max(adapter.card.max_rank, max(of_experts, default=0))

    def release(self, adapter_slot: int) -> None:
        """Free the slot's rows of experts. A running write ends first, and later launches wait for it."""
        future = self._pending.get(adapter_slot)
        if future is not None and future.exception() is None:
            event = future.result()
            if event is not None:
                event.wait()
        self._experts.release(adapter_slot)

    def is_ready(self, adapter_slot: int) -> bool:
        """Whether a step with this slot would start without waiting. Raises AdapterWriteFailed if its write failed."""
        future = self._pending.get(adapter_slot)
        if future is None:
            return True
        if not future.done():
            return False
        event = self._end_of_write(adapter_slot)
        return event is None or event.query()

    def wait(self, adapter_slots: NDArray[np.int32]) -> None:
        """Order the next launches after the writes of these slots. Raises AdapterWriteFailed if one failed."""
        if not self._pending:
            return
        for adapter_slot in set(adapter_slots.tolist()) & self._pending.keys():
            event = self._end_of_write(adapter_slot)
            if event is not None:
                event.wait()
            del self._pending[adapter_slot]

    def close(self) -> None:
        """Stop the threads after the running write has finished."""
        self._writer.shutdown()
        self._round_pool.shutdown()

    def _layout(self, adapter: LoraAdapter) -> Layout:
        found = self._layouts.get(adapter)
        if found is None:
            self.check(adapter)
            found = self._layouts[adapter] = self._singles.layout(adapter)
        return found

    def _end_of_write(self, adapter_slot: int) -> torch.cuda.Event | None:
        """Wait for the writer thread, not for the device. A failure stays until the slot is written again."""
        try:
            return self._pending[adapter_slot].result()
        except Exception as error:  # memory, files or the driver may raise anything: it concerns this adapter only
            raise AdapterWriteFailed(
                f"writing an adapter to {self._device} failed: {type(error).__name__}: {error}; its next request "
                "writes it again"
            ) from error

    def _write(
        self,
        adapter_slot: int,
        row_start: int,
        layout: Layout,
        expert_layout: ExpertLayout | None,
        launched: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        if self._stream is None or launched is None:
            self._send_all(adapter_slot, row_start, layout, expert_layout)
            return None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            launched.wait()
            self._send_all(adapter_slot, row_start, layout, expert_layout)
            done = torch.cuda.Event()
            done.record()
        return done

    def _send_all(self, adapter_slot: int, row_start: int, layout: Layout, expert_layout: ExpertLayout | None) -> None:
        sent = self._send(self._singles.run(row_start, layout), layout.matrices, 0)
        self._singles.point(adapter_slot, row_start, layout)
        if expert_layout is not None:
            self._send(expert_layout.memory, expert_layout.matrices, sent)
        self._experts.point(adapter_slot, expert_layout)

    def _send(self, memory: Tensor, matrices: list[tuple[Matrix, int]], sent: int) -> int:
        """Send matrices one after the other in pieces; a piece may cut a matrix. `sent` pieces were sent before."""
        size = self._buffers[0].memory.numel()
        starts = [start for _, start in matrices]
        ends = [start + array.size for array, start in matrices]
        for first in range(0, len(memory), size):
            end = min(first + size, len(memory))
            parts = []
            for array, start in matrices[bisect_right(ends, first) : bisect_left(starts, end)]:
                flat = np.ascontiguousarray(to_float32(array)).reshape(1, -1)
                parts.append((flat[:, max(first - start, 0) : end - start], max(start - first, 0)))
            piece = self._round(tasks_of(parts), end - first, sent)
            self._copy(memory[first:end], piece, sent)
            sent += 1
        return sent

    def _round(self, tasks: NDArray[np.int64], size: int, sent: int) -> Tensor:
        """Round every task's numbers into the next buffer, once its previous contents have been sent."""
        buffer = self._buffers[sent % len(self._buffers)]
        if buffer.sent is not None:
            buffer.sent.synchronize()
        rounding = [
            self._round_pool.submit(round_rows, tasks[n::_NUM_ROUNDING], 0, 1, size, buffer.bits)
            for n in range(min(_NUM_ROUNDING, len(tasks)))
        ]
        for part in rounding:
            part.result()
        return buffer.memory[:size]

    def _copy(self, out: Tensor, piece: Tensor, sent: int) -> None:
        out.copy_(piece, non_blocking=True)
        if self._stream is not None:
            event = self._buffers[sent % len(self._buffers)].sent = torch.cuda.Event()
            event.record()
