"""Merged into a GGUF base: a folder with which transformers computes as with the model that PEFT merges."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from app.cli.main import main
from app.engine.adapters.features import FEATURES
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.merge import merge
from app.engine.errors import CheckpointError
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.gguf.gguf_export import folder_files
from app.engine.models.tokenizers.tokenizer import load_tokenizer
from tests.engine.adapters.formats.test_peft_parity import ALL, PEFT_WARNINGS
from tests.engine.adapters.parity import base_logits, random_tokens, save_random_adapter
from tests.engine.models.gguf.test_gguf_gemma import model_of, write_gemma
from tests.engine.models.gguf.test_gguf_model import CONFIGS, MIXTURES, write_gguf

pytestmark = PEFT_WARNINGS

GEMMAS = {"gemma2": {}, "gemma3": {"num_hidden_layers": 7}}
KINDS = [("llama", Kind.Q8_0), *((name, Kind.F32) for name in (*CONFIGS, *GEMMAS) if name != "llama-llama3-rope")]


def written(path: Path, name: str, kind: Kind) -> Any:
    """A tiny random model, and the file of it; the model has the weights that the file gives back."""
    if name in GEMMAS:
        model: Any = model_of(name)
        write_gemma(path, name, model, kind)
        return model
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    write_gguf(path, model, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and kind != Kind.F32:
                values = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(values.reshape(parameter.shape)))
    return model


@pytest.mark.parametrize(("name", "kind"), KINDS, ids=lambda one: getattr(one, "name", one))
def test_transformers_computes_with_the_folder_as_with_pefts(name: str, kind: Kind, tmp_path: Path) -> None:
    model = written(tmp_path / "m.gguf", name, kind)
    options = {"use_dora": True} if name == "qwen3" else {}
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=ALL, r=4, **options)  # type: ignore[arg-type]
    save_random_adapter(model, tmp_path / "adapter", config)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    adapter = read_adapter(tmp_path / "adapter", checkpoint.spec, supported_features=FEATURES)
    assert merge(checkpoint, adapter, tmp_path / "merged") == len(adapter.weights)

    tokens = random_tokens(model, length=40)
    expected = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").merge_and_unload()
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert found.dtype == torch.float32
    wanted = base_logits(expected, tokens)
    assert np.abs(base_logits(found.eval(), tokens) - wanted).max() <= 2e-5 * max(1.0, np.abs(wanted).max())
    assert np.abs(base_logits(model, tokens) - wanted).max() > 1e-2

    again = load_checkpoint(tmp_path / "merged").spec
    assert (again.family, again.layers[-1].attention.window) == (
        checkpoint.spec.family, checkpoint.spec.layers[-1].attention.window,
    )  # fmt: skip
    assert again.eos_token_ids == checkpoint.spec.eos_token_ids
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [2]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        folder_files(path, load_checkpoint(path).spec)
    return str(raised.value)


def test_what_no_configuration_says_is_refused_by_name(tmp_path: Path) -> None:
    architecture, config = MIXTURES["mixtral"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    write_gguf(tmp_path / "mixtral.gguf", model, Kind.F32, architecture, expert_count=6, expert_used_count=2)
    said = refusal(tmp_path / "mixtral.gguf")
    assert "'mixtral.gguf' is a GGUF file of the family 'mixtral'" in said
    assert "Name the model's own folder" in said

    # Scaling as Llama 3 has it, of another context than any that was published: the file has only what comes of it.
    written(tmp_path / "rope.gguf", "llama-llama3-rope", Kind.F32)
    assert "'rope.gguf' has layers.0.attention.rope.inv_freq." in refusal(tmp_path / "rope.gguf")


def test_llama_3s_scaling_is_found_again(tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIGS["llama-llama3-rope"])
    config.rope_parameters = {**config.rope_parameters, "original_max_position_embeddings": 8192}
    write_gguf(tmp_path / "m.gguf", AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    text = folder_files(tmp_path / "m.gguf", load_checkpoint(tmp_path / "m.gguf").spec)["config.json"]
    assert '"rope_type": "llama3"' in text
    assert '"factor": 8.0' in text


def test_the_demo_bases_tokenizer_and_template_come_along(demo_gguf: Path, tmp_path: Path) -> None:
    for name, text in folder_files(demo_gguf, load_checkpoint(demo_gguf).spec).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    ours, again, theirs = load_tokenizer(demo_gguf), load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("SELECT name FROM users;", "<|im_start|>user\nHow many?<|im_end|>\n", "naïve 日本  12345\t\n"):
        assert ours.encode(text) == again.encode(text) == theirs.encode(text)
        assert theirs.decode(theirs.encode(text)) == text
    messages = [{"role": "user", "content": "How many users are there?"}]
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == ours.render_chat(messages) == again.render_chat(messages)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_token_id, ours.bos_token_id)


def test_the_command_merges_into_a_gguf_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path / "m.gguf", "llama-tied", Kind.F32)
    save_random_adapter(model, tmp_path / "adapter", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4))
    command = ["merge", str(tmp_path / "adapter"), str(tmp_path / "merged"), "--base", str(tmp_path / "m.gguf")]
    assert main(command) == 0
    assert f"wrote {tmp_path / 'merged'}: 2 modules merged" in capsys.readouterr().out
