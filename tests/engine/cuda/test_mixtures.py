"""Mixtures of experts on the GPU engine: PEFT's logits, captured steps, writes in order."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.engine.cuda import adapters as gpu_adapters
from app.engine.cuda.backend import CudaBackend
from app.engine.errors import AdapterMismatch, AdapterTooLarge
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.spec import ModelSpec
from load_tests.engine.steps import Piece, forward_batch
from tests.engine.adapters.moe_parity import (
    PEFT_WARNINGS,
    check_every_format,
    check_one_lora_per_expert,
    tiny_mixture,
)
from tests.engine.adapters.random_adapters import random_mixture_adapter, random_tensors
from tests.engine.batch_invariance import latent_spec, mixture_spec, sinks_spec
from tests.engine.cuda.exact_operations import ExactOperations
from tests.engine.cuda.gpu import FORM, TORCH, gpu_backend, gpu_backend_of_checkpoint, gpu_config
from tests.engine.cuda.simulated_cuda import DEVICE, simulated_cuda
from tests.pairwise import pairwise
from tests.seeds import rng

SPEC = mixture_spec()
SERVED = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2 query latents"]


@pytest.fixture(scope="module", params=SERVED)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(transformers' model, our backend) of one family."""
    folder = tmp_path_factory.mktemp("base")
    model = tiny_mixture(request.param)
    model.save_pretrained(folder)
    backend = gpu_backend_of_checkpoint(load_checkpoint(folder), gpu_config(batch_invariant=True, num_kv_blocks=64))
    yield model, backend
    backend.close()


class TestAdaptersOfEveryLayout:
    """The judge is PEFT, as for the CPU engine."""

    pytestmark = PEFT_WARNINGS

    def test_alone_and_all_in_one_batch(self, mixture: Any, tmp_path: Path) -> None:
        check_every_format(*mixture, tmp_path)

    def test_one_lora_per_expert(self, mixture: Any, tmp_path: Path) -> None:
        check_one_lora_per_expert(*mixture, tmp_path)


def _answers(backend: CudaBackend, slots: list[int], ends: tuple[int, ...] = (5, 6, 7)) -> list[np.ndarray]:
    """Logits of a prompt and of tokens behind it, of a sequence per slot."""
    found = []
    for start, end in itertools.pairwise((0, *ends)):
        pieces = [
            Piece((np.arange(start, end) * 7 + slot) % 50, start, np.array([index]), slot)
            for index, slot in enumerate(slots)
        ]
        backend.forward(forward_batch(pieces, backend.limits.block_size))
        found.append(backend.logits(len(slots)).copy())
    return found


@pairwise({"spec": (SPEC, sinks_spec(), latent_spec()), "dtype": ("float32", "bfloat16")}, strength=1)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(spec: ModelSpec, dtype: str) -> None:
    """Prompts, and captured steps of another size; without a GPU no order of sums is a library's, either."""
    generator = rng()
    config = gpu_config(lora_pool_rows=96, batch_invariant=True, dtype=dtype, max_num_seqs=4)
    backend = gpu_backend(spec, random_tensors(spec), config)
    for slot, rank in ((1, 5), (2, 20), (3, 16)):
        backend.write_adapter(slot, 32 * (slot - 1), random_mixture_adapter(spec, rank, generator))
    with ExactOperations() if FORM == "torch" else nullcontext():
        together = _answers(backend, [0, 1, 2, 3])
        alone = [_answers(backend, [slot]) for slot in range(4)]
    for slot, found in enumerate(alone):
        for step, logits in enumerate(found):
            np.testing.assert_array_equal(logits[0], together[step][slot])
    backend.close()


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # padding rows hold anything
@pytest.mark.skipif(FORM == "triton", reason="compares the plain form, which is for the host")
@pytest.mark.parametrize("whole", [SPEC, sinks_spec(), latent_spec()], ids=lambda spec: spec.family)
def test_both_forms_of_the_kernels_give_the_same_logits(whole: ModelSpec) -> None:
    spec, generator = replace(whole, layers=whole.layers[-2:-1]), rng()
    tensors, adapters = random_tensors(spec), [random_mixture_adapter(spec, rank, generator) for rank in (3, 20)]
    logits = []
    for form in ("torch", "triton"):
        config = gpu_config(lora_pool_rows=64, batch_invariant=True, max_num_seqs=3)
        backend = gpu_backend(spec, tensors, config, form)
        for slot, adapter in enumerate(adapters, 1):
            backend.write_adapter(slot, 32 * (slot - 1), adapter)
        logits.append(_answers(backend, [0, 1, 2], ends=(5, 6)))
        backend.close()
    for ours, theirs in zip(*logits, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("spec", [SPEC, sinks_spec(), latent_spec()], ids=lambda spec: spec.family)
def test_a_captured_step_reads_the_adapter_that_its_slot_has_now(spec: ModelSpec) -> None:
    """Captured at the start; slots are written anew and released, and memory is another's then."""
    generator, tensors = rng(), random_tensors(spec)
    adapters = [random_mixture_adapter(spec, 8, generator) for _ in range(3)]
    config = gpu_config(
        skip_precompile=False, max_num_seqs=2, lora_pool_rows=32, batch_invariant=True, max_num_batched_tokens=16
    )
    backend = gpu_backend(spec, tensors, config)
    captured = backend.graphs.num_captures
    seen: dict[int, list[np.ndarray]] = {}
    for n in (0, 1, 2, 1, 0):
        backend.write_adapter(1, 16, adapters[n])
        found = _answers(backend, [0, 1])
        for before, now in zip(seen.setdefault(n, found), found, strict=True):
            np.testing.assert_array_equal(before, now)
        backend.release_adapter(1)
    assert np.abs(seen[0][1][1] - seen[1][1][1]).max() > 1e-3
    np.testing.assert_array_equal(seen[0][1][0], seen[1][1][0])
    assert backend.graphs.num_captures == captured
    backend.close()


@pytest.mark.parametrize("piece_bytes", [500, 3000])
def test_on_a_device_writes_and_steps_are_in_order(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of experts go through the same pinned buffers, cut where a buffer ends."""
    monkeypatch.setattr(gpu_adapters, "_PIECE_BYTES", piece_bytes)
    generator, tensors = rng(), random_tensors(SPEC)
    adapters = [random_mixture_adapter(SPEC, rank, generator) for rank in (8, 5, 16)]

    def answers(backend: CudaBackend) -> list[np.ndarray]:
        found = []
        for round_ in range(3):
            for slot in (1, 2):
                backend.write_adapter(slot, 16 * slot, adapters[(slot + round_) % 3])
            found += _answers(backend, [1, 2])
            backend.release_adapter(1)
        return found

    config = gpu_config(max_num_seqs=2, lora_pool_rows=64, max_num_batched_tokens=16, batch_invariant=True)
    with simulated_cuda(monkeypatch) as simulated:
        backend = CudaBackend(SPEC, iter(tensors), config, DEVICE, TORCH)
        in_order = answers(backend)
        assert simulated.races == []
        backend.close()
    monkeypatch.undo()
    plain = gpu_backend(SPEC, tensors, config, "torch")
    for ours, theirs in zip(in_order, answers(plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    plain.close()


def test_an_adapter_that_the_device_has_no_room_for_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, tensors = rng(), random_tensors(SPEC)
    large, small = (random_mixture_adapter(SPEC, rank, generator) for rank in (24, 2))
    config = gpu_config(max_num_seqs=2, lora_pool_rows=32, max_num_batched_tokens=16)
    with simulated_cuda(monkeypatch) as simulated:
        backend = CudaBackend(SPEC, iter(tensors), config, DEVICE, TORCH)
        simulated.limit_bytes = simulated.num_allocated + large.card.extra_bytes // 4
        with pytest.raises(AdapterTooLarge, match=re.escape(f"holds {large.card.extra_bytes} bytes beside")):
            backend.write_adapter(1, 0, large)
        simulated.limit_bytes = 1 << 40
        backend.write_adapter(1, 0, small)
        assert all(np.isfinite(logits).all() for logits in _answers(backend, [0, 1]))
        backend.close()


def test_a_module_the_decoder_does_not_have_is_refused() -> None:
    backend = gpu_backend(SPEC, random_tensors(SPEC), gpu_config())
    other = replace(SPEC, layers=(SPEC.layers[1],) * 3)  # our first layer has no experts
    with pytest.raises(AdapterMismatch, match=r"no module '(experts|gate|shared_expert).*' .* in layer 0"):
        backend.prepare_adapter(random_mixture_adapter(other, 4, rng()))
    backend.close()
