"""Embeddings through vLLM's pooling runner: vectors of length 1, those of the CPU engine, for base and adapters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.engine.adapters.adapter import LoraAdapter
from app.engine.config import EngineConfig
from app.engine.errors import UnsupportedField
from app.engine.request import GenerateRequest, PoolingParams, SamplingParams
from tests.engine.running import Served, engine_config, make_adapter, ref_of, vllm_section, write_model

_NUMBERS = itertools.count()
PROMPTS = [(5, 6, 7, 8), (9, 10), tuple(range(3, 60))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def pooling_config(kind: str) -> EngineConfig:
    return EngineConfig.model_validate({"max_num_seqs": 4, "vllm": vllm_section(kind) | {"runner": "pooling"}})


@pytest.fixture(scope="module", params=["fake", pytest.param("vllm", marks=[pytest.mark.nightly, pytest.mark.vllm])])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    served = Served(request.param, folder, pooling_config(request.param))
    yield served
    assert served.engine.stop(60)


def embed(
    served: Served, token_ids: tuple[int, ...], adapter: LoraAdapter | None = None, **pooling: Any
) -> NDArray[np.float32]:
    """The vector, which is one of length 1."""
    name = f"e{next(_NUMBERS)}"
    ref = ref_of(adapter) if adapter is not None else None
    params = PoolingParams(**pooling)
    served.engine.submit(GenerateRequest(name, "a", token_ids, SamplingParams(), ref, pooling=params), adapter)
    last = served.last(name)
    assert last.error is None, last.error
    assert last.usage is None or last.usage.completion_tokens == 0
    vector = np.frombuffer(last.embedding, "<f4")
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
    return vector


def test_vectors_depend_on_the_text_and_the_adapter(served: Served) -> None:
    adapters = [None, make_adapter(served.spec, 1), make_adapter(served.spec, 2)]
    found = [embed(served, prompt, adapter) for prompt in PROMPTS for adapter in adapters]
    assert {vector.shape for vector in found} == {(served.spec.hidden_size,)}
    assert len({vector.tobytes() for vector in found}) == len(found)
    shorter = embed(served, PROMPTS[0], num_dimensions=8)
    whole = embed(served, PROMPTS[0])[:8].astype(np.float64)
    np.testing.assert_allclose(shorter, whole / np.linalg.norm(whole), atol=1e-6)


def test_text_and_another_pooling_are_refused_by_name(served: Served) -> None:
    with pytest.raises(UnsupportedField, match="embeddings, not text"):
        served.submit(PROMPTS[0])
    with pytest.raises(UnsupportedField, match=r"'mean' but engine\.vllm pools as the checkpoint says: 'last'"):
        embed(served, PROMPTS[0], method="mean")


def test_a_generating_engine_says_how_to_embed(folder: Path) -> None:
    served = Served("fake", folder)
    with pytest.raises(UnsupportedField, match=r"engine\.vllm\.runner: pooling only"):
        embed(served, PROMPTS[0])
    assert served.engine.stop(60)


@pytest.mark.nightly
@pytest.mark.vllm
def test_vectors_are_those_of_the_cpu_engine(folder: Path) -> None:
    ours = Served("cpu", folder, engine_config("cpu"))
    theirs = Served("vllm", folder, pooling_config("vllm"))
    for prompt in PROMPTS:
        for adapter in (None, make_adapter(ours.spec, 1)):
            np.testing.assert_allclose(embed(theirs, prompt, adapter), embed(ours, prompt, adapter), atol=1e-5)
    for served in (ours, theirs):
        assert served.engine.stop(60)
