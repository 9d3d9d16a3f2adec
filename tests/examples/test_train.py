"""Packing chats into one row changes no loss and no gradient; a saved adapter is what the recipe says."""

from __future__ import annotations

import json
from pathlib import Path
from random import SystemRandom

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from examples.training.train import answer_loss, pack, save

VOCAB_SIZE = 64
# peft 0.21.2 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def tiny_model() -> PeftModel:
    """A random two-layer Llama with a LoRA whose B is not zero."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(config), lora)


def random_chats(num_chats: int, num_common: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) pairs of random lengths whose prompts share their first tokens."""
    rng = SystemRandom()
    common = [rng.randrange(VOCAB_SIZE) for _ in range(num_common)]
    return [
        (
            common + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 9))],  # with one token q changes nothing
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 7))],
        )
        for _ in range(num_chats)
    ]


@pytest.mark.parametrize(("num_chats", "num_common"), [(1, 0), (1, 4), (2, 0), (3, 5), (5, 11)])
def test_packed_loss_and_gradient_equal_separate_chats(num_chats: int, num_common: int) -> None:
    model, chats = tiny_model(), random_chats(num_chats, num_common)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    packed = answer_loss(model, pack(chats))
    packed_gradients = torch.autograd.grad(packed, weights)
    losses = []
    for prompt, answer in chats:
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
    separate = torch.stack(losses).sum() / sum(len(answer) for _, answer in chats)
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(packed_gradients, torch.autograd.grad(separate, weights), strict=True):
        assert bool(theirs.any())
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_common_start_is_stored_once() -> None:
    chats = random_chats(6, 20)
    num_tokens = sum(len(prompt) + len(answer) for prompt, answer in chats)
    assert pack(chats).token_ids.shape[1] <= num_tokens - 5 * 20


def test_saved_folder_is_bfloat16_and_names_the_public_base(tmp_path: Path) -> None:
    model = tiny_model()
    save(model, "Says what it does.", tmp_path / "demo")
    card = (tmp_path / "demo" / "README.md").read_text()
    assert "Says what it does." in card
    assert "license: apache-2.0\n" in card
    assert "`python -m examples.training.train demo`" in card
    config = json.loads((tmp_path / "demo" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "SmolLM2-135M-Instruct"
    saved = load_file(tmp_path / "demo" / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    trained = {name.replace(".default", ""): weight for name, weight in model.named_parameters() if "lora_" in name}
    assert set(saved) == set(trained)
    for name, weight in saved.items():
        assert torch.equal(weight, trained[name].detach().to(torch.bfloat16)), name
