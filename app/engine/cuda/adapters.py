"""Rank rows on a device, and the way an adapter takes into them while decoding goes on.

In: an adapter, its slot and its run of rows. Out: `RankRows` per layer and product for the kernels. A write is done
by one thread of its own: it rounds rows into pinned buffers, sends them on a stream of their own, and then writes
the slot's start and ranks. No step reads a slot before `wait` has put the end of its write before the step.

    a of a product   [R, L, N, d_in]     what one adapter has of it is one piece: one copy per write and product
    b                [R, L, W]           (cut into pieces of a few MiB, so that a step's own copies get through)

L are the layers that have the product. Rows of experts lie elsewhere (`expert_rows`) and are sent by the same thread.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.adapters.lora import LoraAdapter, Matrix, widened
from app.engine.cuda.expert_rows import ExpertTables, Placed
from app.engine.errors import AdapterMismatch, AdapterWriteFailed
from app.engine.models.products import Stacked, stacked_products
from app.engine.models.spec import ModelSpec
from app.kernels.moe_lora.expert_rows import ExpertRows
from app.kernels.rank_rows import RankRows
from app.kernels.rounding.cpu import round_rows, tasks_of

#: Bytes of a pinned buffer, and how many there are: one is filled while another is sent.
_PIECE_BYTES, _NUM_BUFFERS = 2 << 20, 3
#: Threads that round rows; one cannot read host memory as fast as a device takes it.
_NUM_ROUNDING = 4


@dataclass(slots=True)
class _Table:
    """One table of a product. `width` numbers per rank row and layer; `starts`: target -> its first column."""

    values: Tensor  # [R, L, width]
    starts: dict[str, int]


class _Buffer:
    """A pinned piece of host memory, as a tensor and as the bits of its numbers."""

    def __init__(self, size: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self.memory = torch.empty(size, dtype=dtype, pin_memory=pinned)
        same_size = torch.int16 if dtype.itemsize == 2 else torch.int32
        self.bits = self.memory.view(same_size).numpy().view(np.uint16 if dtype.itemsize == 2 else np.uint32)
        self.sent: torch.cuda.Event | None = None


class AdapterTables:
    """Rank rows of every module, written in the background."""

    def __init__(
        self, spec: ModelSpec, num_rows: int, max_slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raises CheckpointError for layers that differ in what is not their feed-forward."""
        self._device = device
        self._stacked = tuple(one for one in stacked_products(spec) if one.product.has_rank_rows)
        self._modules = {
            (layer, target) for product, layers in self._stacked for layer in layers for target in product.targets
        }
        self._a: dict[str, _Table] = {}
        self._b: dict[str, _Table] = {}
        self._ranks: dict[str, Tensor] = {}
        for product, layers in self._stacked:
            d_in, count, num_layers = product.d_in, len(product.targets), len(layers)
            for tables, width, starts in (
                (self._a, count * d_in, range(0, count * d_in, d_in)),
                (self._b, product.width(), product.starts()),
            ):
                values = torch.zeros(num_rows, num_layers, width, dtype=dtype, device=device)
                tables[product.name] = _Table(values, dict(zip(product.targets, starts, strict=True)))
            self._ranks[product.name] = torch.zeros(num_layers, max_slots, count, dtype=torch.int32, device=device)
        self._row_starts = torch.zeros(max_slots, dtype=torch.int32, device=device)
        self._experts = ExpertTables(spec, max_slots, device, dtype)
        self.max_ranks = np.zeros(max_slots, np.int64)  # the host's: the largest rank of a slot's adapter
        self._pending: dict[int, Future[torch.cuda.Event | None]] = {}
        self._writer = ThreadPoolExecutor(1, "adapter-writer")
        self._rounding = ThreadPoolExecutor(_NUM_ROUNDING, "adapter-rounding")
        widest = max(t.values.shape[1] * t.values.shape[2] for t in (*self._a.values(), *self._b.values()))
        size = max(_PIECE_BYTES, widest * dtype.itemsize) // dtype.itemsize
        on_gpu = device.type == "cuda"
        self._buffers = [_Buffer(size, dtype, pinned=on_gpu) for _ in range(_NUM_BUFFERS if num_rows else 0)]
        for buffer in self._buffers[:1]:
            round_rows(tasks_of([]), 0, 0, 1, buffer.bits)  # compiled now, not under the first adapter
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self.num_writes = 0

    def check(self, adapter: LoraAdapter) -> None:
        """Raises AdapterMismatch for a module that is not in the tables."""
        for key in adapter.weights:
            if not (self._experts.has(key) or (key.expert is None and key[:2] in self._modules)):
                raise AdapterMismatch(
                    f"this engine has no module {key.target!r} (expert {key.expert}) in layer {key.layer}"
                )

    def rows(self, layer: int) -> dict[str, RankRows]:
        """The tables of one layer's products, by name; their addresses never change."""
        return {one.product.name: self._rows(layer, one) for one in self._stacked if layer in one.layers}

    def expert_rows(self, layer: int) -> dict[str, ExpertRows]:
        """The same of its experts' products; nothing where it has none."""
        return self._experts.rows(layer)

    def _rows(self, layer: int, stacked: Stacked) -> RankRows:
        place, (name, widths) = stacked.layers.index(layer), (stacked.product.name, stacked.product.widths)
        a = self._a[name].values[:, place].unflatten(1, (len(widths), -1)).transpose(0, 1)  # [N, R, d_in]
        return RankRows(a, self._b[name].values[:, place], widths, self._row_starts, self._ranks[name][place])

    def write(self, adapter_slot: int, row_start: int, adapter: LoraAdapter) -> None:
        """Begin a write. It follows what has been launched: a step without a token to draw may still be running.

        Raises torch.OutOfMemoryError where there is no room for the rows of experts.
        """
        self.release(adapter_slot)
        placed = self._experts.take(adapter_slot, adapter)
        launched = None
        if self._stream is not None:
            launched = torch.cuda.current_stream(self._device).record_event()
        self._pending[adapter_slot] = self._writer.submit(
            self._write, adapter_slot, row_start, adapter, placed, launched
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
        self._rounding.shutdown()

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
        adapter: LoraAdapter,
        placed: Placed | None,
        launched: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        if self._stream is None or launched is None:
            self._send_all(adapter_slot, row_start, adapter, placed)
            return None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            launched.wait()
            self._send_all(adapter_slot, row_start, adapter, placed)
            done = torch.cuda.Event()
            done.record()
        return done

    def _send_all(self, adapter_slot: int, row_start: int, adapter: LoraAdapter, placed: Placed | None) -> None:
        sent = 0
        for product, layers in self._stacked:
            ranks, name = self._ranks[product.name], product.name
            own = {key: pair for key, pair in adapter.weights.items() if key.target in product.targets}
            table = np.zeros((ranks.shape[0], ranks.shape[2]), np.int32)  # [L, N]
            for key, pair in own.items():
                table[layers.index(key.layer), product.targets.index(key.target)] = pair.rank
            if own:
                places = {key: (layers.index(key.layer), key.target) for key in own}
                sent = self._send(self._a[name], row_start, [(pair.a, *places[key]) for key, pair in own.items()], sent)
                sent = self._send(self._b[name], row_start, [(pair.b, *places[key]) for key, pair in own.items()], sent)
            ranks[:, adapter_slot] = torch.from_numpy(table).to(self._device)
        self._row_starts[adapter_slot].fill_(row_start)
        if placed is not None:
            self._send_flat(placed, sent)
        self._experts.point(adapter_slot, placed)
        self.num_writes += 1

    def _send(self, table: _Table, row_start: int, parts: list[tuple[Matrix, int, str]], sent: int) -> int:
        """Rows of one table, piece by piece; `sent` pieces went before. Rows of absent modules stay as they were.

        parts: matrix, the layer's place, and target.
        """
        num_rows = max(len(part) for part, _, _ in parts)
        _, num_layers, width = table.values.shape
        row_size = num_layers * width
        contiguous = [
            (np.ascontiguousarray(widened(part)), place * width + table.starts[target]) for part, place, target in parts
        ]
        tasks = tasks_of(contiguous)
        per_piece = self._buffers[0].memory.numel() // row_size
        for first in range(0, num_rows, per_piece):
            end = min(first + per_piece, num_rows)
            piece = self._rounded(tasks, first, end, row_size, sent)
            target_rows = table.values[row_start + first : row_start + end]
            self._copy(target_rows, piece.view(end - first, num_layers, width), sent)
            sent += 1
        return sent

    def _send_flat(self, placed: Placed, sent: int) -> None:
        """Matrices one behind the other, piece by piece: a piece is one row of the buffer, and may cut a matrix."""
        size = self._buffers[0].memory.numel()
        flat = [(np.ascontiguousarray(widened(array)).reshape(1, -1), start) for array, start in placed.matrices]
        for first in range(0, len(placed.memory), size):
            end = min(first + size, len(placed.memory))
            parts = [
                (array[:, max(first - start, 0) : end - start], max(start - first, 0))
                for array, start in flat
                if start < end and start + array.shape[1] > first
            ]
            piece = self._rounded(tasks_of(parts), 0, 1, end - first, sent)
            self._copy(placed.memory[first:end], piece, sent)
            sent += 1

    def _rounded(self, tasks: NDArray[np.int64], first: int, end: int, row_size: int, sent: int) -> Tensor:
        """Rows first to end of every task's matrix in the next buffer, once what it held has been sent."""
        buffer = self._buffers[sent % len(self._buffers)]
        if buffer.sent is not None:
            buffer.sent.synchronize()
        rounding = [
            self._rounding.submit(round_rows, tasks[n::_NUM_ROUNDING], first, end, row_size, buffer.bits)
            for n in range(min(_NUM_ROUNDING, len(tasks)))
        ]
        for part in rounding:
            part.result()
        return buffer.memory[: (end - first) * row_size]

    def _copy(self, out: Tensor, piece: Tensor, sent: int) -> None:
        out.copy_(piece, non_blocking=True)
        if self._stream is not None:
            event = self._buffers[sent % len(self._buffers)].sent = torch.cuda.Event()
            event.record()
