"""Adapters lie side by side in no more rank rows than their own modules fill, and none of them changes another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.engine.adapters.adapter import LoraAdapter
from app.engine.config import CpuConfig, EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.engine import Engine
from app.engine.errors import AdapterTooLarge
from app.engine.request import GenerateRequest, SamplingParams
from tests.engine.adapters.random_adapters import random_adapter, random_tensors, tiny_spec
from tests.engine.driving import run, tokens_of
from tests.engine.served import served_logits
from tests.fakes import fake_request

SPEC = tiny_spec()
#: By their ranks alone these adapters take 72 rank rows.
CONFIG = EngineConfig(
    cpu=CpuConfig(num_threads=2), num_kv_blocks=64, lora_pool_rows=32, max_num_batched_tokens=256, max_num_seqs=64,
    speculative_decoding="off",
)  # fmt: skip


def adapters() -> list[LoraAdapter]:
    """They need 4, 2, 8, 8, 4 and 2 rank rows: in no order that would leave a gap between any two."""
    return [
        random_adapter(SPEC, 16, ["q_proj", "v_proj"], seed=1, size=0.3),
        random_adapter(SPEC, 16, ["q_proj", "v_proj"], seed=2, size=0.3, dtype="BF16", saved_in="BF16", alpha=16),
        random_adapter(SPEC, 8, seed=3, size=0.3),
        random_adapter(SPEC, 16, seed=4, size=0.3, dtype="BF16", saved_in="BF16", alpha=16),
        random_adapter(SPEC, 8, seed=5, size=0.3, dtype="BF16", saved_in="BF16", alpha=8),
        random_adapter(SPEC, 8, ["down_proj"], seed=6, size=0.3),
    ]


def request(name: str, adapter: LoraAdapter) -> GenerateRequest:
    return fake_request(
        name, [5, 6, 7], adapter, sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    )


def test_logits_of_neighbours_are_those_of_each_alone() -> None:
    backend = CpuBackend(SPEC, random_tensors(SPEC), CONFIG)
    tokens = torch.arange(3, 12)[None]
    found = adapters()
    assert [backend.limits.rank_rows_of(adapter) for adapter in found] == [4, 2, 8, 8, 4, 2]
    together = served_logits(backend, [None, *found], tokens)
    assert all(np.any(logits != together[0]) for logits in together[1:])
    for adapter, logits in zip(found, together[1:], strict=True):
        np.testing.assert_array_equal(served_logits(backend, [adapter], tokens)[0], logits)
    backend.close()


def test_all_are_resident_at_once_and_one_that_comes_after_another_has_its_own_text() -> None:
    backend = CpuBackend(SPEC, random_tensors(SPEC), CONFIG)
    engine = Engine(backend, CONFIG)
    found = adapters()
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
    assert stats.num_rank_rows_free == 32 - sum(item.num_rows for item in stats.residents) == 4
    engine.close()


def test_a_rank_beyond_the_rows_is_served_where_few_modules_have_it() -> None:
    backend = CpuBackend(SPEC, random_tensors(SPEC), CONFIG)
    engine = Engine(backend, CONFIG)
    few, all_modules = random_adapter(SPEC, 64, ["k_proj"], seed=1), random_adapter(SPEC, 33, seed=1)
    engine.submit(request("few", few), few)
    assert len(tokens_of(run(engine)["few"])) == 8
    with pytest.raises(AdapterTooLarge, match=r"needs \d+ rank rows.*at most 32.*lora_pool_rows"):
        engine.submit(request("all", all_modules), all_modules)
    engine.close()
