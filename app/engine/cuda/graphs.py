"""Decode steps as CUDA graphs, one per number of sequences and bound of ranks.

Graphs are captured at start or, with skip_precompile, at first use. Adapter slots, rank rows, block tables and
everything else of a step are contents of arrays with fixed addresses, so no adapter or sequence ever causes a capture:
`num_captures` stays constant.

Without CUDA a graph is the function itself over the same static arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Bucket(NamedTuple):
    """A graph's shape. `max_rank` bounds the ranks in the step; 0: no sequence has an adapter and no LoRA kernel is
    launched.
    """

    num_sequences: int
    max_rank: int


def batch_sizes(max_sequences: int) -> list[int]:
    """Batch sizes that get a graph: powers of two, and from 16 on steps of an eighth to a quarter."""
    sizes = {1, 2, 4, 8, 12, 16, max_sequences}
    size = 16
    while size < max_sequences:
        sizes.update(range(size, 2 * size, max(8, size // 4)))
        size *= 2
    return sorted(n for n in sizes if n <= max_sequences)


def rank_bounds(num_rank_rows: int) -> list[int]:
    """Rank bounds that get graphs: 0 for the base, two common ones, and the largest rank that fits."""
    return sorted({0, min(16, num_rank_rows), min(64, num_rank_rows), num_rank_rows})


class DecodeGraphs:
    """Graphs by bucket, sharing one memory pool."""

    def __init__(
        self, sizes: Sequence[int], bounds: Sequence[int], run: Callable[[Bucket], None], device: torch.device
    ) -> None:
        """`run` launches a bucket's step; its inputs and outputs must keep their addresses."""
        self._sizes, self._bounds = list(sizes), list(bounds)
        self._run = run
        self._device = device
        self._captured: dict[Bucket, Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.num_captures = 0
        self.capture_s = 0.0

    def bucket(self, num_sequences: int, max_rank: int) -> Bucket | None:
        """The smallest bucket that holds the step, or None."""
        size = next((n for n in self._sizes if n >= num_sequences), None)
        bound = next((bound for bound in self._bounds if bound >= max_rank), None)
        return None if size is None or bound is None else Bucket(size, bound)

    def capture_all(self) -> None:
        """Capture every bucket, the largest first: the others fit into its memory."""
        for size in reversed(self._sizes):
            for bound in self._bounds:
                self._find(Bucket(size, bound))

    def replay(self, bucket: Bucket) -> None:
        """Run the step whose inputs are in the bucket's arrays."""
        self._find(bucket)()

    def _find(self, bucket: Bucket) -> Callable[[], None]:
        if bucket not in self._captured:
            began_s = time.perf_counter()
            self._captured[bucket] = self._capture(bucket)
            self.capture_s += time.perf_counter() - began_s
            self.num_captures += 1
        return self._captured[bucket]

    def _capture(self, bucket: Bucket) -> Callable[[], None]:
        if self._stream is None:
            return lambda: self._run(bucket)
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._run(bucket)  # compiles kernels, fills workspaces
            self._stream.synchronize()
            # thread_local: adapters may be written meanwhile, by their own thread.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._run(bucket)
            graph.capture_end()
        main.wait_stream(self._stream)
        return graph.replay
