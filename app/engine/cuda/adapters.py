"""Adapters on a device, and the way they take into its memory while decoding goes on.

In: an adapter, its slot and its run of rows. Out: `RankRows` and `ExpertRows` per layer and product for the kernels. A
write is done by one thread of its own: it rounds matrices into pinned buffers, sends them on a stream of their own, and
then writes where the slot's matrices lie and their ranks. No step reads a slot before `wait` has put the end of its
write before the step. Pieces are a few MiB, so that a step's own copies get through.

Which matrix lies where is decided in `rank_rows` and, for experts', in `expert_rows`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.adapters.adapter import LoraAdapter, Matrix, widened
from app.engine.cuda.lora_tables import Layout, LoraTables
from app.engine.cuda.moe_lora_tables import ExpertLayout, MoeLoraTables
from app.engine.errors import AdapterMismatch, AdapterWriteFailed
from app.engine.models.spec import ModelSpec
from app.kernels.cast_bf16.cpu import round_rows, tasks_of
from app.kernels.lora_rows import RankRows
from app.kernels.moe_lora.expert_lora_rows import ExpertRows

#: Bytes of a pinned buffer, and how many there are: one is filled while another is sent.
_PIECE_BYTES, _NUM_BUFFERS = 2 << 20, 3
#: Threads that round rows; one cannot read host memory as fast as a device takes it.
_NUM_ROUNDING = 4


class _Buffer:
    """A pinned piece of host memory, as a tensor and as the bits of its numbers."""

    def __init__(self, size: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.memory = torch.empty(size, dtype=dtype, pin_memory=pinned)
        same_size = torch.int16 if dtype.itemsize == 2 else torch.int32
        self.bits = self.memory.view(same_size).numpy().view(np.uint16 if dtype.itemsize == 2 else np.uint32)
        self.sent: torch.cuda.Event | None = None


class AdapterTables:
    """Rank rows of every module and of experts, written in the background."""

    def __init__(
        self, spec: ModelSpec, num_rows: int, max_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raises CheckpointError for layers that differ in what is not their feed-forward."""
        self._device = device
        self._singles = LoraTables(spec, num_rows, max_slots, device, dtype)
        self._layouts: WeakKeyDictionary[LoraAdapter, Layout] = WeakKeyDictionary()
        self._experts = MoeLoraTables(spec, max_slots, device, dtype)
        self.max_ranks = np.zeros(max_slots, np.int64)  # the host's: the largest rank of a slot's adapter
        self._pending: dict[int, Future[torch.cuda.Event | None]] = {}
        self._writer = ThreadPoolExecutor(1, "adapter-writer")
        self._round_pool = ThreadPoolExecutor(_NUM_ROUNDING, "adapter-rounding")
        size = max(1, _PIECE_BYTES // dtype.itemsize)
        on_gpu = device.type == "cuda"
        self._buffers = [_Buffer(size, dtype, pinned=on_gpu) for _ in range(_NUM_BUFFERS if num_rows else 0)]
        for buffer in self._buffers[:1]:
            round_rows(tasks_of([]), 0, 0, 1, buffer.bits)  # compiled now, not under the first adapter
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self.num_writes = 0

    def check(self, adapter: LoraAdapter) -> None:
        """Raises AdapterMismatch for a module that is not in the tables."""
        for key in adapter.weights:
            if not (self._experts.has(key) or self._singles.has(key)):
                raise AdapterMismatch(
                    f"this engine has no module {key.target!r} (expert {key.expert}) in layer {key.layer}"
                )

    def num_rows(self, adapter: LoraAdapter) -> int:
        """How many rank rows it needs. Any thread. Raises AdapterMismatch as `check` does."""
        return self._layout(adapter).num_rows

    def rows(self, layer: int) -> dict[str, RankRows]:
        """The tables of one layer's products, by name; their addresses never change."""
        return self._singles.rows(layer)

    def expert_rows(self, layer: int) -> dict[str, ExpertRows]:
        """The same of its experts' products; nothing where it has none."""
        return self._experts.rows(layer)

    def write(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """Begin a write. It follows what has been launched: a step without a token to draw may still be running.

        Raises torch.OutOfMemoryError where there is no room for the rows of experts.
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
        """Free the slot's rows of experts; a write that has begun ends first, and what is launched next follows it."""
        future = self._pending.get(adapter_slot)
        if future is not None and future.exception() is None:
            event = future.result()
            if event is not None:
                event.wait()
        self._experts.release(adapter_slot)

    def is_ready(self, adapter_slot: int) -> bool:
        """Whether a step with that slot would not wait. Raises AdapterWriteFailed if its write failed."""
        future = self._pending.get(adapter_slot)
        if future is None:
            return True
        if not future.done():
            return False
        event = self._end_of_write(adapter_slot)
        return event is None or event.query()

    def wait(self, adapter_slots: NDArray[np.int32]) -> None:
        """Put the writes of these slots before what is launched next. Raises AdapterWriteFailed if one failed."""
        if not self._pending:
            return
        for adapter_slot in set(adapter_slots.tolist()) & self._pending.keys():
            event = self._end_of_write(adapter_slot)
            if event is not None:
                event.wait()
            del self._pending[adapter_slot]

    def close(self) -> None:
        """End the threads; a write that has begun is finished."""
        self._writer.shutdown()
        self._round_pool.shutdown()

    def _layout(self, adapter: LoraAdapter) -> Layout:
        found = self._layouts.get(adapter)
        if found is None:
            self.check(adapter)
            found = self._layouts[adapter] = self._singles.layout(adapter)
        return found

    def _end_of_write(self, adapter_slot: int) -> torch.cuda.Event | None:
        """Wait for the writer, not for the device. A failed write stays failed until the slot is written again."""
        try:
            return self._pending[adapter_slot].result()
        except Exception as error:  # whatever memory, files or the driver may raise: it is this adapter's alone
            raise AdapterWriteFailed(
                f"an adapter could not be written to {self._device}: {type(error).__name__}: {error}; its next request "
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
        self.num_writes += 1

    def _send(self, memory: Tensor, matrices: list[tuple[Matrix, int]], sent: int) -> int:
        """Matrices one behind the other, piece by piece; `sent` pieces went before. A piece may cut a matrix."""
        size = self._buffers[0].memory.numel()
        starts = [start for _, start in matrices]
        ends = [start + array.size for array, start in matrices]
        for first in range(0, len(memory), size):
            end = min(first + size, len(memory))
            parts = []
            for array, start in matrices[bisect_right(ends, first) : bisect_left(starts, end)]:
                flat = np.ascontiguousarray(widened(array)).reshape(1, -1)
                parts.append((flat[:, max(first - start, 0) : end - start], max(start - first, 0)))
            piece = self._round(tasks_of(parts), end - first, sent)
            self._copy(memory[first:end], piece, sent)
            sent += 1
        return sent

    def _round(self, tasks: NDArray[np.int64], size: int, sent: int) -> Tensor:
        """Every task's numbers in the next buffer, once what it held has been sent."""
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
