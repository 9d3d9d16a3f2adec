"""Times on a GPU: CUDA graphs and events, medians, and the machine's own ceilings.

A graph's replay has no launch gaps, as in the engine's decode steps; calls that cannot be captured are timed with
events around them. The ceilings are measured in the same run as the values compared with them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Clock:
    """How much of a budget is left."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()


class Ceilings(NamedTuple):
    """bandwidth: bytes/s, read and written, of a copy of 2 GiB. matrix: flop/s of a bf16 product of 8192."""

    bandwidth: float
    matrix: float


def graph_seconds(call: Callable[[], object], num_replays: int = 15) -> float:
    """Median time of a replay of `call` as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return event_seconds(graph.replay, num_replays)


def event_seconds(call: Callable[[], object], num_repeats: int = 15) -> float:
    """Median time of `call` between two events, after three calls to warm up."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(num_repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def ceilings() -> Ceilings:
    """This device's ceilings, with random values: products of zeros are faster than real ones."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / event_seconds(lambda: target.copy_(source))
    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return Ceilings(bandwidth, 2 * 8192**3 / event_seconds(lambda: torch.mm(left, right, out=out)))
