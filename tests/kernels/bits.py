"""The bits of the CPU kernels' results on seeded inputs: `python -m tests.kernels.bits` prints a digest for each.

A program of its own, because a process compiles for one machine; see `test_machines`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.kernels.bf16_matmul import self_test
from app.kernels.cast_bf16.reference import bfloat16_bits
from app.kernels.machine.jit import jit
from app.kernels.machine.thread_team import ThreadTeam
from app.kernels.matmul import cpu, int8, pack_weights
from app.kernels.paged_attention import cpu as attention
from app.kernels.sgmv import cpu as lora
from tests.kernels.cases import normal

Floats = NDArray[np.float32]
_DEPTH, _WIDTH, _RANK = 200, 80, 16
_BATCHES = (*range(1, 20), 32, 50)


@jit
def _multiply(x, w, out):  # type: ignore[no-untyped-def]
    int8.multiply_any_panels(x, w, 0, out.shape[1] // 16, out, False, cpu.NO_FETCH)


def _rounded_products(generator: np.random.Generator) -> Iterator[Floats]:
    w = self_test.panels_for(normal(generator, _WIDTH, _DEPTH), self_test.machine_forms()[0], max(_BATCHES))
    for num_rows in _BATCHES:
        out = np.zeros((num_rows, _WIDTH), np.float32)
        self_test.multiply_once(normal(generator, num_rows, _DEPTH), w, out, accumulate=False)
        yield out


def _products(generator: np.random.Generator, *, quantised: bool) -> Iterator[Floats]:
    w = normal(generator, _WIDTH, _DEPTH)
    packed = pack_weights.quantise(w) if quantised else cpu.pack(w)
    for num_rows in _BATCHES:
        out = np.zeros((num_rows, _WIDTH), np.float32)
        _multiply(normal(generator, num_rows, _DEPTH), packed, out)
        yield out


def _deltas(generator: np.random.Generator) -> Iterator[Floats]:
    """Of one adapter of rank 16 and the base, in turn."""
    a, b = normal(generator, _RANK // 8, _DEPTH, 8), normal(generator, _RANK, _WIDTH)
    at_a, at_b = (np.array([[0], [table.ctypes.data]]) for table in (a, b))
    ranks, team = np.array([[0], [_RANK]], np.int32), ThreadTeam(2)
    rows = lora.ModuleRows(at_a, at_b, ranks, np.array([_WIDTH // 16]), np.zeros(2, np.bool_))
    for num_rows in _BATCHES:
        runs = lora.adapter_runs(np.array([0, 1, num_rows + 1], np.int32), np.array([0, 1], np.int32))
        x, shrunk = normal(generator, num_rows + 1, _DEPTH), np.zeros((num_rows + 1, 1, _RANK), np.float32)
        out = normal(generator, num_rows + 1, _WIDTH)
        team.run(lora.shrink, 1, x, rows, lora.shrink_tasks(runs), _RANK, shrunk)
        team.run(lora.expand, 1, shrunk, rows, runs, out)
        yield out


def _attended(generator: np.random.Generator, *, in_bf16: bool) -> Iterator[Floats]:
    k_memory: NDArray[Any] = normal(generator, 8, 2, 32, 16)
    v_memory: NDArray[Any] = normal(generator, 8, 2, 16, 32)
    if in_bf16:
        k_memory, v_memory = bfloat16_bits(k_memory), bfloat16_bits(v_memory)
    for num_queries in _BATCHES:
        starts, out = np.array([0, num_queries], np.int32), np.empty((num_queries, 6 * 32), np.float32)
        ThreadTeam(2).run(
            attention.paged_attention, 1, normal(generator, num_queries, 6 * 32), 32, np.float32(32**-0.5), 0,
            np.float32(0.0), np.zeros(0, np.float32), attention.attention_tasks(starts), starts,
            np.array([num_queries + 60], np.int32), np.arange(8, dtype=np.int32)[None], k_memory, v_memory, out,
        )  # fmt: skip
        yield out


def digests() -> str:
    """A line for each kernel: its name and the digest of its results."""
    results = {
        "float32 products": _products(np.random.default_rng(1), quantised=False),
        "8-bit products": _products(np.random.default_rng(2), quantised=True),
        "products in bfloat16": _rounded_products(np.random.default_rng(5)),
        "LoRA deltas": _deltas(np.random.default_rng(3)),
        "attention": _attended(np.random.default_rng(4), in_bf16=False),
        "attention over bfloat16": _attended(np.random.default_rng(6), in_bf16=True),
    }
    return "".join(
        f"{name}: {hashlib.sha256(b''.join(out.tobytes() for out in outs)).hexdigest()}\n"
        for name, outs in results.items()
    )


if __name__ == "__main__":
    print(digests(), end="")
