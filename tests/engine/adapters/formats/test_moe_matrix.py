"""The matrix: every family of mixtures, every format of adapters, the base, one adapter, and eight in one batch.

The eight have different ranks and change different experts. Each gives PEFT's logits (merged weights' where PEFT loads
none of its kind), and the same bits alone and in any batch (`batch_invariance.py` says which batches).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import CpuConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.checkpoint import Checkpoint, load_checkpoint
from tests.engine.adapters.moe_parity import (
    FAMILIES,
    FORMATS,
    PEFT_WARNINGS,
    Expected,
    expected,
    names_of_old,
    per_expert_folder,
    save_random,
    tiny_mixture,
    with_experts_merged,
)
from tests.engine.adapters.parity import random_tokens
from tests.engine.batch_invariance import disturbed
from tests.engine.served import CONFIG, served_logits

pytestmark = PEFT_WARNINGS

#: Format -> another rank for each.
RANKS = {
    "attention": 10,
    "all experts": 3,
    "all-linear": 2,
    "only gate_up": 5,
    "only down": 9,
    "router and experts": 8,  # and 3 and 1, by its pattern
}
#: Format -> expert -> rank, of adapters with one LoRA per expert.
OLD = {"one LoRA per expert": dict.fromkeys(range(4), 6), "some experts, each at its own rank": {1: 7, 3: 17}}
MIN_BATCHES = 300
MIN_BATCHES_NIGHTLY = 2000
#: One round of about 1,000 has no preemption with a probability of a tenth: after twenty such rounds, none happens.
MAX_BATCHES = 20_000
#: What `disturbed` counts.
KINDS = ("batches", "preemptions", "evictions", "hits", "right guesses", "wrong guesses")


class Mixture(NamedTuple):
    """A model of transformers', the same as we read it, and eight adapters of it in folders, one of each format."""

    model: Any
    checkpoint: Checkpoint
    folders: dict[str, Path]

    @property
    def adapters(self) -> list[LoraAdapter]:
        return [read_adapter(folder, self.checkpoint.spec) for folder in self.folders.values()]


@pytest.fixture(scope="module", params=FAMILIES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    model = tiny_mixture(request.param, vocab_size=120, max_position_embeddings=256)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder / "model")
    folders = {name: folder / str(index) for index, name in enumerate([*FORMATS, *OLD])}
    for name, settings in FORMATS.items():
        save_random(model, folders[name], settings | {"r": RANKS[name]})
    for name, ranks in OLD.items():
        per_expert_folder(model, folders[name], *names_of_old(model), ranks=ranks)
    return Mixture(model, load_checkpoint(folder / "model"), folders)


def _expected(mixture: Mixture, name: str, tokens: Any) -> Expected:
    """PEFT's of what PEFT loads, else those of merged weights."""
    if name in OLD:
        merged = with_experts_merged(mixture.model, mixture.folders[name], *names_of_old(mixture.model))
        return expected(merged, tokens)
    return expected(mixture.model, tokens, mixture.folders[name])


def test_the_base_one_adapter_and_eight_in_one_batch(mixture: Mixture) -> None:
    spec, adapters, tokens = mixture.checkpoint.spec, mixture.adapters, random_tokens(mixture.model)
    largest = [max(pair.rank for pair in adapter.weights.values()) for adapter in adapters]
    assert len(set(largest)) == len(adapters) == 8, largest
    backend = CpuBackend(spec, mixture.checkpoint.tensors(), CONFIG)
    base, *together = served_logits(backend, [None, *adapters], tokens)
    assert expected(mixture.model, tokens).allows(base)
    assert np.array_equal(served_logits(backend, [None], tokens)[0], base)
    for name, adapter, found in zip(mixture.folders, adapters, together, strict=True):
        assert _expected(mixture, name, tokens).allows(found), name
        assert np.abs(found - base).max() > 0.01, "an adapter that changes nothing shows nothing"
        assert np.array_equal(served_logits(backend, [adapter], tokens)[0], found), name
    backend.close()


def _disturb(mixture: Mixture, at_least: int) -> None:
    """Random batches in tight engines, until there were `at_least` and everything that could disturb has happened."""
    disturbances = np.zeros(len(KINDS), np.int64)
    while disturbances[0] < at_least or (not disturbances.all() and disturbances[0] < MAX_BATCHES):
        disturbances += disturbed(
            CpuBackend,
            CpuConfig(weight_dtype="float32"),
            spec=mixture.checkpoint.spec,
            tensors=mixture.checkpoint.tensors,
            adapters=mixture.adapters,
        )
    assert disturbances.all(), dict(zip(KINDS, disturbances, strict=True))


def test_bits_are_the_same_alone_and_in_any_batch(mixture: Mixture) -> None:
    _disturb(mixture, MIN_BATCHES)


@pytest.mark.nightly
def test_bits_are_the_same_over_two_thousand_batches(mixture: Mixture) -> None:
    _disturb(mixture, MIN_BATCHES_NIGHTLY)
