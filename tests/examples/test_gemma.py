"""Gemma's recipe: its chat template, its configuration, and packed training over layers with windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.utils.chat_template_utils import render_jinja_template

from app.config import AppConfig
from app.engine.models.chat.chat_template import ChatTemplate
from app.engine.models.download.model_download import GEMMA_MODEL_URI
from examples.training.gemma import FOLDER, TEMPLATE
from examples.training.train import answer_loss, pack

ROOT = Path(__file__).parents[2]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "SELECT 1;"},
    {"role": "user", "content": "And now?"},
]
# peft 0.21.2 reads a property that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_chat_is_lines_and_ends_before_the_answers(first: int) -> None:
    lines = ["Be brief.\n", "Question: How many?\n", "Query:\nSELECT 1;\n", "Question: And now?\n"]
    wanted = f"<bos>{''.join(lines[first:])}Query:\n"
    served = ChatTemplate(TEMPLATE, {"bos_token": "<bos>"}).render(MESSAGES[first:])
    (trained,), _ = render_jinja_template(
        [MESSAGES[first:]], chat_template=TEMPLATE, add_generation_prompt=True, bos_token="<bos>"
    )
    assert (served, trained) == (wanted, wanted)


def test_the_configuration_serves_what_the_recipe_writes() -> None:
    document = yaml.safe_load((ROOT / "configs" / "serve-gemma.yaml").read_text())
    config = AppConfig.model_validate(document["applications"][0]["args"])
    assert config.model.uri == GEMMA_MODEL_URI
    assert [(item.name, item.path) for item in config.adapters.preload] == [(FOLDER.name, FOLDER.name)]
    assert [Path(root) for root in config.adapters.roots] == [FOLDER.parent]


def test_chats_packed_into_one_row_are_trained_as_alone() -> None:
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(Gemma3ForCausalLM(config), lora)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    chats = [([1, 7, 9, 30 + index, 5], [40 + index, 3 * index + 2]) for index in range(3)]
    packed = answer_loss(model, pack(chats))
    alone = torch.stack([answer_loss(model, pack([chat])) for chat in chats]).mean()
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    of_packed, of_alone = torch.autograd.grad(packed, weights), torch.autograd.grad(alone, weights)
    for ours, theirs in zip(of_packed, of_alone, strict=True):
        assert bool(theirs.any())
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
