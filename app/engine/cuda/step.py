"""A step's arrays on the device: one packed vector of integers, copied once, and views of it.

The host side is pinned, so the host does not wait for the copy; it is rewritten only after the copy has finished.
Padding has no visible effect: its tokens have no adapter and no place in KV memory, its sequences no keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.batch import ForwardBatch


class StepShape(NamedTuple):
    """Sizes of a step, padding included. `table_width`: blocks per sequence."""

    num_tokens: int
    num_sequences: int
    num_segments: int
    table_width: int

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of the vector; kv_slots take two places each."""
        tokens, sequences = self.num_tokens, self.num_sequences
        return {
            "kv_slots": (tokens,),
            "token_ids": (tokens,),
            "positions": (tokens,),
            "adapter_slots": (tokens,),
            "query_starts": (sequences + 1,),
            "seq_lens": (sequences,),
            "segments": (self.num_segments, 3),
            "block_tables": (sequences, self.table_width),
        }

    @property
    def size(self) -> int:
        """Length of the vector in int32."""
        return sum(_align(math.prod(sizes)) for sizes in self.fields.values()) + _align(2 * self.num_tokens)


class Step(NamedTuple):
    """T tokens, B sequences, G segments (runs of tokens with one adapter as the kernels cut them), on the device.

    The rest is on the host: `max_query_len`, the most tokens of a sequence; `max_rank`, a bound of the adapters' ranks,
    0 without adapters; `block_tokens`, tokens per segment, 0 if tokens are computed one by one.
    """

    kv_slots: Tensor  # [T] int64
    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    adapter_slots: Tensor  # [T] int32
    query_starts: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32
    segments: Tensor  # [G, 3] int32
    block_tables: Tensor  # [B, N] int32
    max_query_len: int
    max_rank: int
    block_tokens: int


class StepVector:
    """A step's packed vector in host and in device memory."""

    def __init__(self, device: torch.device, max_shape: StepShape, num_kv_slots: int) -> None:
        """`num_kv_slots`: the first slot beyond KV memory; padding is written there."""
        self._num_kv_slots = num_kv_slots
        self._host = torch.zeros(max_shape.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(max_shape.size, dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, batch: ForwardBatch, shape: StepShape, segments: NDArray[np.int32]) -> dict[str, Tensor]:
        """Lay the batch out in `shape` and copy it; returns views of the device's vector, by name."""
        if self._sent is not None:
            self._sent.synchronize()  # a step that samples no token may end before its copy has begun
        flat = self._host.numpy()[: shape.size]
        views = _views(flat, shape)
        tokens, sequences = len(batch.token_ids), len(batch.seq_lens)
        views["kv_slots"][:tokens] = batch.kv_slots
        views["kv_slots"][tokens:] = self._num_kv_slots
        views["token_ids"][:tokens] = batch.token_ids
        views["positions"][:tokens] = batch.positions
        views["adapter_slots"][:tokens] = np.repeat(batch.run_adapter_slots, np.diff(batch.run_starts))
        for name in ("token_ids", "positions", "adapter_slots"):
            views[name][tokens:] = 0
        views["query_starts"][: sequences + 1] = batch.query_starts
        views["query_starts"][sequences + 1 :] = tokens
        views["seq_lens"][:sequences] = batch.seq_lens
        views["seq_lens"][sequences:] = 0
        views["segments"][: len(segments)] = segments
        views["segments"][len(segments) :] = 0
        views["block_tables"][:sequences] = batch.block_tables
        views["block_tables"][sequences:] = 0
        self._device[: shape.size].copy_(self._host[: shape.size], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return self.views(shape)

    def views(self, shape: StepShape) -> dict[str, Tensor]:
        """Views of the device's vector in this shape."""
        return _views(self._device[: shape.size], shape)


def _views(flat: Any, shape: StepShape) -> dict[str, Any]:
    """Parts of an array or tensor, by name."""
    views = {}
    start = 0
    for name, sizes in shape.fields.items():
        width = math.prod(sizes) * (2 if name == "kv_slots" else 1)
        part = flat[start : start + width]
        if name == "kv_slots":
            part = part.view(torch.int64) if isinstance(part, Tensor) else part.view(np.int64)
        views[name] = part.reshape(sizes)
        start += _align(width)
    return views


def _align(count: int) -> int:
    """Round up to 16 bytes: kernels are compiled for aligned fields."""
    return -(-count // 4) * 4
