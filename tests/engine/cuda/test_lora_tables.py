"""Adapters on a device take rank rows for their own modules and ranks, and lie side by side without touching."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.engine.adapters.adapter import LoraAdapter, LoraKey, LoraPair
from app.engine.cuda.backend import CudaBackend
from app.engine.engine import Engine
from app.engine.errors import AdapterMismatch, AdapterTooLarge
from app.engine.models.spec import ModelSpec
from app.engine.pools.adapter_pool import rows_of
from app.kernels.lora_rows import START_MULTIPLE
from tests.engine.adapters.random_adapters import random_adapter, random_mixture_adapter, random_tensors, tiny_spec
from tests.engine.batch_invariance import latent_spec, mixture_spec
from tests.engine.cpu.test_rank_rows import request
from tests.engine.cuda.gpu import FORM, KernelForm, gpu_backend, gpu_config
from tests.engine.driving import run, tokens_of
from tests.engine.served import served_logits
from tests.seeds import rng

SPEC = tiny_spec()
CONFIG = gpu_config(num_kv_blocks=64, lora_pool_rows=48, max_loras=16, max_model_len=64, batch_invariant=True)


def _backend(form: KernelForm = FORM) -> CudaBackend:
    return gpu_backend(SPEC, random_tensors(SPEC), CONFIG, form)


def _adapters() -> list[LoraAdapter]:
    """By their largest ranks they take 32, 16, 16, 16 and 16 rank rows."""
    return [
        random_adapter(SPEC, 17, ["q_proj", "v_proj"], seed=1, size=0.3),
        random_adapter(SPEC, 3, ["down_proj"], seed=2, size=0.3),
        random_adapter(SPEC, 8, seed=3, size=0.3),
        random_adapter(SPEC, 16, ["o_proj"], seed=4, size=0.3),
        random_adapter(SPEC, 1, seed=5, size=0.3),
    ]


@pytest.mark.parametrize("form", sorted({FORM, "torch"}))
def test_logits_of_neighbours_are_those_of_each_alone(form: KernelForm) -> None:
    backend, found, tokens = _backend(form), _adapters(), torch.arange(3, 12)[None]
    together = served_logits(backend, [None, *found], tokens)
    assert all(np.any(logits != together[0]) for logits in together[1:])
    for adapter, logits in zip(found, together[1:], strict=True):
        np.testing.assert_array_equal(served_logits(backend, [adapter], tokens)[0], logits)
    backend.close()


def test_all_are_resident_at_once_and_one_that_comes_after_another_has_its_own_text() -> None:
    engine, found = Engine(_backend(), CONFIG), _adapters()
    assert sum(rows_of(adapter.card.max_rank, CONFIG.rank_alignment) for adapter in found) == 96
    alone = []
    for adapter in found:
        engine.submit(request("alone", adapter), adapter)
        alone.append(tokens_of(run(engine)["alone"]))
        engine.unload_adapter(adapter.card.digest)
        engine.step()
    for index, adapter in enumerate(found):
        engine.submit(request(str(index), adapter), adapter)
    chunks = run(engine)
    assert [tokens_of(chunks[str(index)]) for index in range(len(found))] == alone
    stats = engine.stats()
    assert (len(stats.residents), stats.num_adapter_evictions) == (len(found), 0)
    engine.close()


def test_a_rank_beyond_the_rows_is_served_where_few_modules_have_it() -> None:
    engine = Engine(_backend(), CONFIG)
    few, all_modules = random_adapter(SPEC, 64, ["k_proj"], seed=1), random_adapter(SPEC, 33, seed=1)
    engine.submit(request("few", few), few)
    assert len(tokens_of(run(engine)["few"])) == 8
    with pytest.raises(AdapterTooLarge, match=r"needs \d+ rank rows.*at most 32.*lora_pool_rows"):
        engine.submit(request("all", all_modules), all_modules)
    engine.close()


@pytest.mark.parametrize("spec", [SPEC, mixture_spec(), latent_spec()], ids=lambda spec: spec.family)
def test_an_adapter_needs_at_most_its_largest_rank_rounded_up(spec: ModelSpec) -> None:
    """Who knows an adapter by its rank alone counts so; and memory for it is where the rows are."""
    generator = rng()
    backend = gpu_backend(spec, random_tensors(spec), CONFIG)
    for _ in range(50):
        adapter = random_mixture_adapter(spec, int(generator.integers(1, 40)), generator)
        rank = max(pair.rank for pair in adapter.weights.values())
        needed = backend.limits.rank_rows_of(adapter)
        assert 1 <= needed <= -(-rank // START_MULTIPLE) * START_MULTIPLE
        layout = backend._tables._layout(adapter)
        assert sum(matrix.size for matrix, _ in layout.matrices) <= layout.size
        assert all(start % START_MULTIPLE == 0 for _, start in layout.matrices)
    backend.close()


def test_an_array_that_several_modules_have_is_held_once() -> None:
    """A module saved fused has one A for its parts."""
    adapter = random_adapter(SPEC, 16, ["q_proj", "k_proj", "v_proj"], seed=1, size=0.3)
    shared = {
        key: LoraPair(adapter.weights[LoraKey(key.layer, "q_proj")].a, pair.b) for key, pair in adapter.weights.items()
    }
    fused = LoraAdapter(adapter.card, shared)
    copied = LoraAdapter(adapter.card, {key: LoraPair(pair.a.copy(), pair.b) for key, pair in shared.items()})
    backend, tokens = _backend(), torch.arange(3, 12)[None]
    assert backend._tables._layout(fused).size < backend._tables._layout(copied).size
    found, expected = (served_logits(backend, [one], tokens)[0] for one in (fused, copied))
    np.testing.assert_array_equal(found, expected)
    backend.close()


def test_rows_of_an_adapter_for_another_model_are_not_counted() -> None:
    backend = _backend()
    with pytest.raises(AdapterMismatch, match="in layer 2"):
        backend.limits.rank_rows_of(random_adapter(tiny_spec(num_layers=3), 8))
    backend.close()
