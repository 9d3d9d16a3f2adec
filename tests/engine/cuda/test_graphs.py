"""Decode steps by bucket: which one, that adapters and sequences are data, and that padding cannot be seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.graphs import batch_sizes, rank_bounds
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.random_adapters import random_adapter, random_tensors, tiny_spec
from tests.engine.cuda.gpu import gpu_backend, gpu_config
from tests.seeds import rng


def test_every_number_of_sequences_has_a_size_near_it() -> None:
    for most in (1, 2, 3, 16, 24, 64, 100, 256):
        sizes = batch_sizes(most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
        for n in range(1, most + 1):
            size = next(s for s in sizes if s >= n)
            assert size <= 2 * n
            assert n <= 16 or size <= 1.5 * n
    assert len(batch_sizes(256)) < 30


def test_the_last_bound_is_all_rows() -> None:
    assert rank_bounds(0) == [0]
    assert rank_bounds(16) == [0, 16]
    assert rank_bounds(512) == [0, 16, 64, 512]


def _decode(backend: CudaBackend, slots: list[int], tables: np.ndarray, seed: int) -> np.ndarray:
    """Logits of one decode step at position 5 of sequences whose blocks hold a prompt of 5 tokens."""
    generator = np.random.default_rng(seed)
    prompts = generator.integers(3, 60, (len(slots), 6))
    for start, end in ((0, 5), (5, 6)):
        pieces = [Piece(p[start:end], start, t, s) for p, t, s in zip(prompts, tables, slots, strict=True)]
        backend.forward(forward_batch(pieces, backend.limits.block_size))
    return backend.logits(len(slots)).copy()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_loading_adapters_captures_nothing_and_changes_what_is_computed(batch_invariant: bool) -> None:
    spec = tiny_spec()
    config = gpu_config(skip_precompile=False, max_num_seqs=4, lora_pool_rows=128, batch_invariant=batch_invariant)
    backend = gpu_backend(spec, random_tensors(spec), config)
    captured = backend.graphs.num_captures
    assert captured == len(batch_sizes(4)) * len(rank_bounds(128))
    generator = rng()
    seen: list[np.ndarray] = []
    for round_, rank in enumerate((8, 3, 64, 16, 40)):
        adapters = [random_adapter(spec, rank), random_adapter(spec, 16)]
        backend.write_adapter(1, 0, adapters[0])
        backend.write_adapter(2, 64, adapters[1])
        tables = generator.permutation(64)[: 3 * 2].reshape(3, 2)
        seen.append(_decode(backend, [0, 1, 2], tables, seed=1))
        again = _decode(backend, [0, 1, 2], generator.permutation(64)[:6].reshape(3, 2), seed=1)
        # Bit for bit only where tiles are fixed: in default mode products are the library's.
        np.testing.assert_allclose(
            again, seen[-1], rtol=0, atol=0 if batch_invariant else 1e-5, err_msg=f"round {round_}"
        )
    assert backend.graphs.num_captures == captured
    assert backend.compile_s > 0
    for a, b in itertools.combinations(seen, 2):
        np.testing.assert_allclose(a[0], b[0], rtol=0, atol=1e-5)  # the base is what it is
        assert np.abs(a[1] - b[1]).max() > 1e-3
        assert np.abs(a[2] - b[2]).max() > 1e-3
    backend.close()


@pytest.mark.parametrize("num_sequences", [1, 3, 5, 8])
def test_a_padded_step_is_the_same_as_one_launched_without_padding(num_sequences: int) -> None:
    spec = tiny_spec()
    tensors = random_tensors(spec)
    backends = [gpu_backend(spec, tensors, gpu_config(max_num_seqs=n)) for n in (8, 1)]
    adapters = [random_adapter(spec, rank) for rank in (24, 1)]
    slots = sorted([0, 1, 2, 0, 1, 2, 1, 0][:num_sequences])
    tables = rng().permutation(200)[: 2 * num_sequences].reshape(num_sequences, 2)
    logits = []
    for backend in backends:
        for slot, adapter in enumerate(adapters, 1):
            backend.write_adapter(slot, 32 * slot, adapter)
        logits.append(_decode(backend, slots, tables, seed=2))
    assert backends[1].graphs.num_captures == (num_sequences == 1)
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-4)
    for backend in backends:
        backend.close()
