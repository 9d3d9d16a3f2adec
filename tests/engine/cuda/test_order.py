"""What the engine relies on happening in order on a GPU is put in order by its events, and nothing else is.

On a simulated device: see `simulated_cuda`. Each event and wait of the engine's code is needed by one of
these, but for the last one of a capture: what is captured has not run yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from app.engine.cuda import adapters as gpu_adapters
from app.engine.cuda.backend import CudaBackend
from app.engine.errors import OutOfDeviceMemory
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.random_adapters import random_adapter, random_tensors, tiny_spec
from tests.engine.cuda.gpu import TORCH, gpu_backend, gpu_config
from tests.engine.cuda.simulated_cuda import DEFAULT, DEVICE, Simulated, simulated_cuda

SPEC = tiny_spec()
TENSORS = dict(random_tensors(SPEC))


@contextmanager
def _backend(patch: pytest.MonkeyPatch, **settings: object) -> Iterator[tuple[CudaBackend, Simulated]]:
    """Rounding buffers hold a part of a matrix, so that every write goes around them."""
    patch.setattr(gpu_adapters, "_PIECE_BYTES", 1000)
    config = gpu_config(max_num_seqs=2, lora_pool_rows=64, **settings)
    with simulated_cuda(patch) as simulated:
        backend = CudaBackend(SPEC, iter(TENSORS.items()), config, DEVICE, TORCH)
        yield backend, simulated
        backend.close()


def _step(backend: CudaBackend, slots: list[int], start: int, count: int = 1) -> np.ndarray:
    """Tokens from `start` on of a sequence per slot; the logits."""
    pieces = [
        Piece((np.arange(start, start + count) * 7 + slot) % 50, start, np.array([index]), slot)
        for index, slot in enumerate(slots)
    ]
    backend.forward(forward_batch(pieces, 16))
    return backend.logits(len(slots)).copy()


@pytest.mark.parametrize("is_captured_at_start", [False, True])
def test_steps_and_writes_are_in_order_and_give_the_cpus_logits(
    is_captured_at_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decoding by graphs, and slots that are written anew between and right behind steps that read them."""
    adapters = [random_adapter(SPEC, rank) for rank in (8, 5, 16)]

    def answers(backend: CudaBackend) -> list[np.ndarray]:
        found = []
        for round_ in range(3):
            for slot in (1, 2):
                backend.write_adapter(slot, 16 * slot, adapters[(slot + round_) % 3])
            found.append(_step(backend, [1, 2], 0, 3))
            found += [_step(backend, [1, 2], 3 + n) for n in range(2)]
            found.append(_step(backend, [0, 0], 0, 2))
        return found

    with _backend(monkeypatch, skip_precompile=not is_captured_at_start) as (backend, simulated):
        simulated_answers = answers(backend)
        assert simulated.races == []
        assert backend.graphs.num_captures == (6 if is_captured_at_start else 1)  # 2 sizes, 3 bounds of ranks
    monkeypatch.undo()
    plain = gpu_backend(SPEC, iter(TENSORS.items()), gpu_config(lora_pool_rows=64), "torch")
    for ours, theirs in zip(simulated_answers, answers(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    plain.close()


def test_adapters_are_sent_beside_steps_that_do_not_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with _backend(monkeypatch) as (backend, simulated):
        backend.write_adapter(1, 16, random_adapter(SPEC, 8))
        _step(backend, [0, 1], 0)
        (sending,) = simulated.streams_of_writes
        assert sending != DEFAULT
        known = simulated.clocks[DEFAULT][sending]
        backend.write_adapter(2, 32, random_adapter(SPEC, 8))
        _step(backend, [0, 1], 1)
        assert simulated.clocks[DEFAULT][sending] == known < simulated.clocks[sending][sending]
        _step(backend, [1, 2], 2)
        assert simulated.clocks[DEFAULT][sending] == simulated.clocks[sending][sending]


def test_what_is_allocated_at_the_start_is_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"num_kv_blocks": 0, "memory_bytes": 900 << 20, "extra_weights_bytes": 1 << 20}
    with _backend(monkeypatch, **settings) as (backend, simulated):
        plan = backend.plan
        held = plan.weight_bytes + plan.rank_row_bytes + plan.kv_bytes
        assert held <= simulated.num_allocated <= plan.total_bytes - plan.extra_bytes
        assert plan.budget_bytes - plan.total_bytes < plan.kv_block_bytes


def test_a_device_that_runs_out_at_the_start_is_an_error_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpu_config(memory_bytes=2 << 30)
    with simulated_cuda(monkeypatch, free_bytes=3 << 30) as simulated:
        simulated.limit_bytes = 100_000  # somebody else was faster
        with pytest.raises(OutOfDeviceMemory, match=r"cuda:0 ran out of memory .*tried to allocate") as caught:
            CudaBackend(SPEC, iter(TENSORS.items()), config, DEVICE, TORCH)
        assert re.search(r"256 KV blocks .* of 2.00 GiB; lower engine.cuda.gpu_memory_utilization", str(caught.value))
    numbers = r"budget is 2.00 GiB but 1.00 GiB"
    with simulated_cuda(monkeypatch, free_bytes=1 << 30), pytest.raises(OutOfDeviceMemory, match=numbers):
        CudaBackend(SPEC, iter(TENSORS.items()), config, DEVICE, TORCH)
