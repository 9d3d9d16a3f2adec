"""What this project was asked to be, statement by statement: one test per sentence, on a tiny real model.

Each is tested more widely where its code lies (formats, kernels, engines, routing); here is the list, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig

from app.deployments.ingress.semantic_router.candidates import Candidates
from app.deployments.registry.models import CatalogEntry
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.formats.arrow import ArrowCard, read_card, write_card
from app.engine.adapters.formats.convert import write_peft_folder
from app.engine.adapters.formats.reading import read_adapter, read_raw_adapter
from app.engine.cpu.backend import CpuBackend
from app.engine.pools.adapter_pool import AdapterPool
from tests.engine.adapters.formats.test_peft_parity import ALL, PEFT_WARNINGS
from tests.engine.adapters.parity import base_logits, our_logits, random_tokens, save_random_adapter, tiny_model
from tests.engine.served import CONFIG, backend_of, served_logits

pytestmark = PEFT_WARNINGS

RANKS = (8, 16, 64)


class Seed(NamedTuple):
    """A model, an engine for it, adapters of ranks 8, 16 and 64 with their folders, and tokens."""

    model: torch.nn.Module
    backend: CpuBackend
    folders: list[Path]
    adapters: list[LoraAdapter]
    tokens: torch.Tensor


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Seed:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("seed")
    model = tiny_model("llama", tie_word_embeddings=False)
    backend = backend_of(model, folder / "base")
    folders = [folder / str(rank) for rank in RANKS]
    for rank, path in zip(RANKS, folders, strict=True):
        config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=ALL)
        save_random_adapter(model, path, config)
    adapters = [read_adapter(path, backend.spec) for path in folders]
    return Seed(model, backend, folders, adapters, random_tokens(model))


def test_the_round_trip_is_exact(seed: Seed, tmp_path: Path) -> None:
    stored = read_raw_adapter(seed.folders[0], seed.backend.spec)
    write_card(tmp_path / "it.lora.arrow", ArrowCard("it", stored, {}))
    write_peft_folder(tmp_path / "again", read_card(tmp_path / "it.lora.arrow").raw)
    again = read_raw_adapter(tmp_path / "again", seed.backend.spec)
    assert again == stored
    assert read_adapter(tmp_path / "again", seed.backend.spec).card.digest == seed.adapters[0].card.digest


def test_forward_equals_the_definition(seed: Seed) -> None:
    """y = W x + s B (A x), each module by itself in NumPy."""
    for adapter, logits in zip(seed.adapters, served_logits(seed.backend, seed.adapters, seed.tokens), strict=True):
        np.testing.assert_allclose(logits, our_logits(seed.model, adapter, seed.tokens), rtol=0, atol=2e-5)
        assert np.abs(logits - base_logits(seed.model, seed.tokens)).max() > 1e-2


def test_applied_twice_is_applied_once(seed: Seed) -> None:
    once = served_logits(seed.backend, seed.adapters[:1], seed.tokens)[0]
    seed.backend.write_adapter(1, 0, seed.adapters[0])
    twice = served_logits(seed.backend, seed.adapters[:1], seed.tokens)[0]
    np.testing.assert_array_equal(twice, once)


def test_removed_restores_the_base_bit_for_bit(seed: Seed) -> None:
    before = served_logits(seed.backend, [None], seed.tokens)[0]
    with_adapter = served_logits(seed.backend, seed.adapters[:1], seed.tokens)[0]
    seed.backend.release_adapter(1)
    after = served_logits(seed.backend, [None], seed.tokens)[0]
    assert not np.array_equal(with_adapter, before)
    np.testing.assert_array_equal(after, before)


def test_batched_is_one_by_one(seed: Seed) -> None:
    batched = served_logits(seed.backend, [None, *seed.adapters, None], seed.tokens)
    for adapter, logits in zip([None, *seed.adapters, None], batched, strict=True):
        np.testing.assert_array_equal(served_logits(seed.backend, [adapter], seed.tokens)[0], logits)


def test_base_rows_are_exact(seed: Seed, tmp_path: Path) -> None:
    """Beside adapters they have the bits of an engine that has no room for any."""
    without = backend_of(seed.model, tmp_path, CONFIG.model_copy(update={"lora_pool_rows": 0}))
    expected = served_logits(without, [None], seed.tokens)[0]
    without.close()
    np.testing.assert_array_equal(served_logits(seed.backend, [*seed.adapters, None], seed.tokens)[-1], expected)


def test_the_deltas_numerical_rank_is_at_most_r(seed: Seed) -> None:
    for rank, adapter in zip(RANKS, seed.adapters, strict=True):
        for key, (a, b) in adapter.weights.items():
            delta = b.astype(np.float64).T @ a.astype(np.float64)
            assert np.linalg.matrix_rank(delta) <= min(rank, *delta.shape), key
        assert np.linalg.matrix_rank(delta) == min(rank, *delta.shape)


def test_a_step_goes_through_the_base_once_however_many_adapters(seed: Seed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each base product is one phase of the step's program, in which deltas are added group by group."""
    run, phases = seed.backend._team.run, []

    def counted(program: object, num_phases: int, *arguments: object) -> None:
        phases.append((program, num_phases))
        run(program, num_phases, *arguments)

    monkeypatch.setattr(seed.backend._team, "run", counted)
    steps = []
    for adapters in ([None], seed.adapters[:1], [None, *seed.adapters]):
        served_logits(seed.backend, adapters, seed.tokens)
        steps.append([one for one in phases if one[1] == seed.backend._num_phases])
        phases.clear()
    assert [len(step) for step in steps] == [1, 1, 1]
    assert len({step[0] for step in steps}) == 1


def test_the_router_answers_in_descending_score_and_above_the_threshold() -> None:
    candidates = Candidates()
    vectors = {"a": (0.6, 0.8), "b": (1.0, 0.0), "c": (0.8, 0.6), "d": (0.0, 1.0)}
    for name in vectors:
        ref = AdapterRef(name, name * 64, "t")
        candidates.note(("t", name), CatalogEntry(ref, 8, 64, 0.0, "t", description=name))
    for name, vector in vectors.items():
        owned = candidates._owners["t"]
        owned.pending.clear()
        owned.put(name, name, np.array(vector, np.float32))
    wanted = np.array([1.0, 0.0], np.float32)

    def chosen(threshold: float, top_k: int) -> list[str]:
        return [one.name for one in candidates.nearest(wanted, {"t": None}, lambda *_: True, threshold, top_k)]

    assert chosen(0.6, 4) == ["b", "c", "a"]
    assert chosen(0.6, 2) == ["b", "c"]
    assert chosen(0.81, 4) == ["b"]
    assert chosen(1.01, 4) == []


@pytest.mark.parametrize(("ranks", "padded", "held"), [((8, 16, 64), 192, 88), ((8,) * 9 + (128,), 1280, 200)])
def test_rank_rows_waste_nothing_where_a_padded_table_does(ranks: tuple[int, ...], padded: int, held: int) -> None:
    """docs/explanation/adapter-memory.md has these numbers."""
    pool = AdapterPool(256, 8, 16, 0, "lru")
    for index, rank in enumerate(ranks):
        assert pool.acquire(f"digest {index}", rank, 0, 64, "t") is not None
    assert sum(resident.num_rows for resident in pool.residents()) == held == sum(ranks)
    assert len(ranks) * max(ranks) == padded
