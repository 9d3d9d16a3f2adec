"""Both engines on the demo base: the same logits and the same greedy tokens, for the demo adapters and random ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from app.engine.api import LLM, Generation
from app.engine.config import EngineConfig, XlaConfig
from app.engine.request import SamplingParams
from examples.training.recipes import RECIPES
from examples.training.task import examples
from load_tests.random_adapters import write_random_adapter
from tests.parity.test_peft import DEMO_FOLDER
from tests.seeds import rng

#: By day tests/engine/cpu and tests/engine/xla compare with transformers and PEFT, each on tiny models.
pytestmark = pytest.mark.nightly

TOLERANCE = 1e-4
RANDOM_RANKS = (1, 8, 16, 64)
#: A float32 tie: the first engine hardly prefers its own token. Twice the logits' tolerance.
TIE = 2e-4
#: Small, so that JAX compiles few programs: they are most of this file's time.
CONFIG = EngineConfig(
    num_kv_blocks=128, lora_pool_rows=256, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256,
)  # fmt: skip


@pytest.fixture(scope="module")
def engines(demo_gguf: Path) -> Iterator[tuple[LLM, LLM]]:
    """The CPU engine and the JAX engine."""
    with LLM(demo_gguf, CONFIG) as torch, LLM(demo_gguf, CONFIG.on(XlaConfig(skip_precompile=True))) as jax:
        yield torch, jax


@pytest.fixture(scope="module")
def cases(engines: tuple[LLM, LLM], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], Path | None]]:
    """Prompts with their adapters: two of each demo task, one of each random rank, one of the base."""
    llm, generator = engines[0], rng()
    found: list[tuple[list[int], Path | None]] = []
    for name, recipe in RECIPES.items():
        for example in examples(recipe.task, "heldout", 2, seed=int(generator.integers(1 << 30))):
            found.append((llm.chat_prompt(example.prompt), DEMO_FOLDER / name))
    folder = tmp_path_factory.mktemp("random")
    for rank in RANDOM_RANKS:
        path = write_random_adapter(folder / f"r{rank}", llm.spec, rank, int(generator.integers(1 << 30)))
        found.append((llm.chat_prompt("Name three colours."), path))
    return [*found, (llm.chat_prompt("What is 2 + 2?"), None)]


def _logits(llm: LLM, prompt: list[int], adapter: Path | None) -> np.ndarray:
    """Of the prompt's last position."""
    llm.generate([prompt], [adapter], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    logits: np.ndarray = llm._engine._backend.logits(1)[0].copy()  # both backends show it to tests
    return logits


def test_logits_agree(engines: tuple[LLM, LLM], cases: list[tuple[list[int], Path | None]]) -> None:
    for prompt, adapter in cases:
        ours, theirs = (_logits(llm, prompt, adapter) for llm in engines)
        assert np.ptp(ours) > 1, "the model says something"
        assert np.abs(ours - theirs).max() <= TOLERANCE, adapter


def test_greedy_tokens_agree_in_one_mixed_batch(
    engines: tuple[LLM, LLM], cases: list[tuple[list[int], Path | None]]
) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0.0, num_logprobs=2)
    prompts, adapters = [prompt for prompt, _ in cases], [adapter for _, adapter in cases]
    answers = [llm.generate(prompts, adapters, sampling) for llm in engines]
    base = engines[0].generate(prompts, None, sampling)
    changed = sum(a.token_ids != b.token_ids for a, b in zip(answers[0], base, strict=True))
    assert changed >= len(RECIPES) + 1, "adapters change the answers"
    for ours, theirs in zip(*answers, strict=True):
        _assert_equal_but_for_a_tie(ours, theirs)


def _assert_equal_but_for_a_tie(ours: Generation, theirs: Generation) -> None:
    """Token by token with their log-probabilities, up to the first tie that falls the other way."""
    for one, other in zip(ours.logprobs, theirs.logprobs, strict=False):
        if one.token_id != other.token_id:
            assert one.top[0][1] - one.top[1][1] < TIE, (one, other)
            return
        assert abs(one.logprob - other.logprob) <= TOLERANCE, (one, other)
    assert ours.token_ids == theirs.token_ids
