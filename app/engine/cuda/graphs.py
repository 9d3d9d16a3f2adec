"""Decode steps as CUDA graphs, one per number of sequences and bound of ranks.

In: a bucket. Out: its step, done by a graph that was captured when the engine started (or, with skip_precompile, when
it was first needed). Adapter slots, rank rows, block tables and everything else a step holds are contents of arrays
whose addresses the graph knows; so no adapter, however large, and no sequence ever captures anything: `num_captures`
stays what it is.

Without CUDA a graph is the function itself, over the same static arrays: what is data and what is not is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Bucket(NamedTuple):
    """`max_rank` is a bound of the ranks in the step; 0: nobody has an adapter, and no LoRA kernel is launched."""

    num_sequences: int
    max_rank: int


def batch_sizes(max_sequences: int) -> list[int]:
    """Numbers of sequences that get a graph: powers of two, and from 16 on steps of an eighth to a quarter."""
    sizes = {1, 2, 4, 8, 12, 16, max_sequences}
    size = 16
    while size < max_sequences:
        sizes.update(range(size, 2 * size, max(8, size // 4)))
        size *= 2
    return sorted(n for n in sizes if n <= max_sequences)


def rank_bounds(num_rank_rows: int) -> list[int]:
    """Bounds of ranks that get graphs: the base's 0, two that most adapters keep to, and the largest rank that fits."""
    return sorted({0, min(16, num_rank_rows), min(64, num_rank_rows), num_rank_rows})


class DecodeGraphs:
    """Graphs by bucket, sharing one pool of memory."""

    def __init__(
        self, sizes: Sequence[int], bounds: Sequence[int], run: Callable[[Bucket], None], device: torch.device
    ) -> None:
        """`run` launches a bucket's step; what it reads and writes for others has the same address every time."""
        self._sizes, self._bounds = list(sizes), list(bounds)
        self._run = run
        self._device = device
        self._captured: dict[Bucket, Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.num_captures = 0
        self.capture_s = 0.0

    def bucket(self, num_sequences: int, max_rank: int) -> Bucket | None:
        """The smallest that holds a step, or None where there is none."""
        size = next((n for n in self._sizes if n >= num_sequences), None)
        bound = next((bound for bound in self._bounds if bound >= max_rank), None)
        return None if size is None or bound is None else Bucket(size, bound)

    def capture_all(self) -> None:
        """The largest first: the others fit into its memory."""
        for size in reversed(self._sizes):
            for bound in self._bounds:
                self._find(Bucket(size, bound))

    def replay(self, bucket: Bucket) -> None:
        """Do the step that lies in the bucket's arrays."""
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
