"""Greedy answers equal PEFT's: for the demo adapters and for random ones, all of them in one mixed batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.models.linear_modules import DENSE_TARGETS
from app.engine.request import SamplingParams
from examples.training.recipes import RECIPES
from examples.training.task import examples
from tests import budgets
from tests.engine.adapters.formats.test_peft_parity import BEYOND, OPTIONS

pytestmark = [
    pytest.mark.nightly,  # by day tests/engine/adapters/formats/test_peft_parity.py has each option on tiny models
    # PEFT 0.21 still asks transformers 5.23 for a name it has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

DEMO_FOLDER = Path("examples/adapters")
RANDOM_RANKS = (1, 8, 16, 64)
#: Of each demo adapter's task.
NUM_PROMPTS = min(budgets.examples(8), 20)
GREEDY = SamplingParams(max_tokens=32, temperature=0.0)
#: A float32 tie: at the first different token the reference itself hardly prefers its own.
TIE = 2e-4


@pytest.fixture(scope="module")
def llm(demo_gguf: Path) -> Iterator[LLM]:
    with LLM(demo_gguf, EngineConfig(num_kv_blocks=1024, lora_pool_rows=256)) as engine:
        yield engine


@contextmanager
def _with_adapter(model: PreTrainedModel, folder: Path) -> Iterator[PeftModel]:
    """The shared model with an adapter on top; the model is as it was afterwards."""
    adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    try:
        yield adapted
    finally:
        adapted.unload()


def _reference_answers(model: Any, prompts: list[list[int]], eos: int, count: int) -> list[list[int]]:
    """Greedy tokens by PEFT, all prompts in one left-padded batch, each cut after its end of turn."""
    width = max(map(len, prompts))
    ids = torch.tensor([[eos] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos,
        )
    rows = out[:, width:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def _assert_equal_but_for_ties(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + theirs[:at]])).logits[0, -1]
    gap = float(logits[theirs[at]] - logits[ours[at]])
    assert abs(gap) < TIE, (at, ours, theirs, gap)


def test_demo_adapters_answer_as_under_peft(llm: LLM, demo_transformers: PreTrainedModel) -> None:
    prompts = {
        name: [llm.chat_prompt(e.prompt) for e in examples(recipe.task, "heldout", NUM_PROMPTS, seed=7)]
        for name, recipe in RECIPES.items()
    }
    names = [name for i in range(NUM_PROMPTS) for name in prompts]  # neighbours in the batch use different adapters
    mixed = [prompts[name][i] for i in range(NUM_PROMPTS) for name in prompts]
    answers = llm.generate(mixed, [DEMO_FOLDER / name for name in names], GREEDY)
    base = llm.generate(mixed, None, GREEDY)
    assert sum(a.token_ids != b.token_ids for a, b in zip(answers, base, strict=True)) > len(mixed) // 2
    eos = llm.spec.eos_token_ids[0]
    for name, own in prompts.items():
        ours = [list(a.token_ids) for a, n in zip(answers, names, strict=True) if n == name]
        with _with_adapter(demo_transformers, DEMO_FOLDER / name) as reference:
            theirs = _reference_answers(reference, own, eos, GREEDY.max_tokens)
            for prompt, a, b in zip(own, ours, theirs, strict=True):
                _assert_equal_but_for_ties(reference, prompt, a, b)


def test_random_adapters_of_any_rank_over_every_module_answer_as_under_peft(
    llm: LLM, demo_transformers: PreTrainedModel, tmp_path: Path
) -> None:
    texts = ["Name three colours.", "What is 2 + 2?", "Write one line of Python."]
    prompts = [llm.chat_prompt(text) for text in texts]
    folders = [_save_random(demo_transformers, rank, tmp_path / f"r{rank}") for rank in RANDOM_RANKS]
    answers = llm.generate(
        [p for p in prompts for _ in folders],
        [f for _ in prompts for f in folders],
        SamplingParams(max_tokens=12, temperature=0),
    )
    eos = llm.spec.eos_token_ids[0]
    for i, folder in enumerate(folders):
        ours = [list(a.token_ids) for a in answers[i :: len(folders)]]
        with _with_adapter(demo_transformers, folder) as reference:
            theirs = _reference_answers(reference, prompts, eos, 12)
            for prompt, a, b in zip(prompts, ours, theirs, strict=True):
                _assert_equal_but_for_ties(reference, prompt, a, b)


#: Several options beyond plain LoRA together, over whole modules of the demo model.
COMBINED: dict[str, dict[str, Any]] = {
    "DoRA and norms": {
        "target_modules": list(DENSE_TARGETS),
        "use_dora": True,
        "modules_to_save": ["norm", "input_layernorm"],
    },
    "lora_bias and token rows": {
        "target_modules": ["q_proj", "down_proj"],
        "lora_bias": True,
        "trainable_token_indices": [28, 198, 260, 338, 42, 30],
    },
    "embedding and linear modules": {
        "target_modules": ["v_proj", "embed_tokens"],
        "modules_to_save": ["layers.3.mlp.down_proj", "layers.20.self_attn.o_proj"],
    },
}


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")
@pytest.mark.filterwarnings("ignore:Adapter 'default'. [0-9]* LoRA tensor")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning")
def test_adapters_beyond_plain_lora_answer_as_under_peft_in_one_batch(
    llm: LLM, demo_transformers: PreTrainedModel, tmp_path: Path
) -> None:
    prompts = [llm.chat_prompt(text) for text in ("Name three colours.", "What is 2 + 2?")]
    folders = [tmp_path / name for name in COMBINED]
    for folder, options in zip(folders, COMBINED.values(), strict=True):
        _trained(demo_transformers, options).save_pretrained(str(folder), save_embedding_layers=False)
    sampling = SamplingParams(max_tokens=12, temperature=0)
    answers = llm.generate([p for p in prompts for _ in folders], [f for _ in prompts for f in folders], sampling)
    base = [list(a.token_ids) for a in llm.generate(prompts, None, sampling)]
    eos = llm.spec.eos_token_ids[0]
    for i, folder in enumerate(folders):
        ours = [list(a.token_ids) for a in answers[i :: len(folders)]]
        assert ours != base, folder.name
        # A copy: PEFT's unload leaves what modules_to_save and token indices have trained in the model.
        reference = PeftModel.from_pretrained(copy.deepcopy(demo_transformers), str(folder)).eval()
        theirs = _reference_answers(reference, prompts, eos, 12)
        for prompt, a, b in zip(prompts, ours, theirs, strict=True):
            _assert_equal_but_for_ties(reference, prompt, a, b)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True:UserWarning")
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")
@pytest.mark.filterwarnings("ignore:Adapter 'default'. [0-9]* LoRA tensor")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning")
@pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`, but no tied modules:UserWarning")
def test_every_option_answers_as_under_peft_in_one_batch(
    llm: LLM, demo_transformers: PreTrainedModel, tmp_path: Path
) -> None:
    """Nightly: every option on a tiny model, on every device, is in tests/engine/{cpu,cuda}/test_extras.py."""
    prompt = llm.chat_prompt("Name three colours.")
    options = OPTIONS | {name: settings for name, (settings, _) in BEYOND.items()}
    del options["trainable_token_indices by module"]  # for untied heads
    options["trainable_token_indices"] = {"target_modules": ["q_proj"], "trainable_token_indices": sorted(set(prompt))}
    folders = [tmp_path / str(index) for index in range(len(options))]
    sampling = SamplingParams(max_tokens=6, temperature=0)
    expected = []
    for folder, settings in zip(folders, options.values(), strict=True):
        reference = _trained(demo_transformers, settings)
        reference.save_pretrained(str(folder), save_embedding_layers=False)
        expected += _reference_answers(reference, [prompt], llm.spec.eos_token_ids[0], sampling.max_tokens)
    (base,) = llm.generate([prompt], None, sampling)
    answers = llm.generate([prompt] * len(options), folders, sampling)
    changed = {name for name, answer in zip(options, answers, strict=True) if answer.token_ids != base.token_ids}
    assert "zero alpha" not in changed
    assert len(changed) > len(options) // 6, changed  # about half; some touch a layer or a few tokens only
    for folder, answer, theirs in zip(folders, answers, expected, strict=True):
        if list(answer.token_ids) != theirs:
            reference = PeftModel.from_pretrained(copy.deepcopy(demo_transformers), str(folder)).eval()
            _assert_equal_but_for_ties(reference, prompt, list(answer.token_ids), theirs)


def _trained(model: PreTrainedModel, options: dict[str, Any]) -> PeftModel:
    """A copy with an adapter whose every trained number moved at random, enough to change answers."""
    settings = {"task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "init_lora_weights": False} | options
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**settings)).eval()
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key or "lora_embedding_B" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.03)
            elif parameter.requires_grad and "lora_" not in key:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
            elif "lora_magnitude_vector" in key:
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    return adapted


def _save_random(model: PreTrainedModel, rank: int, folder: Path) -> Path:
    """A PEFT adapter with random A and B on all seven modules, strong enough to change every answer."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(DENSE_TARGETS), init_lora_weights=False)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.02 / rank**0.5)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    adapted.unload()
    return folder
