"""An engine with an adapter in its weights serves that adapter, as the others do, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig

from app.engine.adapters.card import AdapterRef
from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.errors import AdapterMismatch, MergedAdapterOnly
from app.engine.factory import create_engine, new_engine
from app.engine.models.checkpoint import load_checkpoint
from app.engine.request import SamplingParams
from tests.engine.adapters.formats.test_peft_parity import ALL, PEFT_WARNINGS
from tests.engine.adapters.parity import save_random_adapter, tiny_model
from tests.engine.served import write_tokenizer

pytestmark = PEFT_WARNINGS

CONFIG = EngineConfig(num_kv_blocks=64, lora_pool_rows=64)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, num_logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base, two adapters on it, and one that cannot be merged."""
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("merged")
    model = tiny_model("llama", tie_word_embeddings=False)
    model.save_pretrained(path / "base")
    write_tokenizer(path / "base")
    settings = {"task_type": "CAUSAL_LM", "r": 4}
    for name in ("one", "other"):
        save_random_adapter(model, path / name, LoraConfig(**settings, target_modules=ALL, use_dora=name == "one"))
    save_random_adapter(model, path / "head", LoraConfig(**settings, target_modules=["q_proj", "lm_head"]))
    return path


def merged(folder: Path, name: str = "one") -> EngineConfig:
    return CONFIG.model_copy(update={"merged_adapter": str(folder / name)})


def test_answers_are_those_of_the_adapter_beside_the_base(folder: Path) -> None:
    prompts = [np.random.default_rng(seed).integers(3, 96, 20).tolist() for seed in range(4)]
    with LLM(folder / "base", CONFIG) as beside, LLM(folder / "base", merged(folder)) as within:
        expected = beside.generate(prompts, folder / "one", GREEDY)
        found = within.generate(prompts, folder / "one", GREEDY)
        base = beside.generate(prompts, None, GREEDY)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert [answer.token_ids for answer in found] != [answer.token_ids for answer in base]
    for ours, theirs in zip(found, expected, strict=True):
        logprobs = [[line.logprob for line in answer.logprobs] for answer in (ours, theirs)]
        np.testing.assert_allclose(*logprobs, rtol=0, atol=2e-5)


def test_everything_else_is_refused_by_name(folder: Path) -> None:
    with LLM(folder / "base", merged(folder)) as within:
        with pytest.raises(MergedAdapterOnly, match="the request is for the base model"):
            within.generate([[5, 6]], None, GREEDY)
        with pytest.raises(MergedAdapterOnly, match="other"):
            within.generate([[5, 6]], folder / "other", GREEDY)


def test_whoever_places_requests_finds_it_resident_and_it_stays(folder: Path) -> None:
    checkpoint = load_checkpoint(folder / "base")
    engine = new_engine(checkpoint, merged(folder))
    assert engine.merged is not None
    digest = engine.merged.digest
    with LLM(folder / "base", CONFIG) as beside:
        one, other = (beside.load_adapter(folder / name) for name in ("one", "other"))
    assert one.card.digest == digest
    assert engine.load_adapter(one, AdapterRef("one", digest, "t")).result() == 0
    with pytest.raises(MergedAdapterOnly):
        engine.load_adapter(other, AdapterRef("other", other.card.digest, "t"))
    freed = engine.unload_adapter(digest)
    engine.step()
    assert freed.result() == 0
    assert [(resident.digest, resident.num_rows) for resident in engine.stats().residents] == [(digest, 0)]
    engine.close()


def test_a_merged_engine_warms_up(folder: Path) -> None:
    engine = create_engine(load_checkpoint(folder / "base"), merged(folder), lambda _: None)
    engine.warm_up()
    assert engine.failure is None
    assert engine.stats().num_finished > 0
    engine.stop()


def test_what_cannot_be_merged_is_refused_when_the_engine_starts(folder: Path) -> None:
    with pytest.raises(AdapterMismatch, match="lm_head"):
        new_engine(load_checkpoint(folder / "base"), merged(folder, "head"))
