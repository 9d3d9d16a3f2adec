"""Folders as trainers leave them: what lies beside the adapter changes nothing, and pickles are never opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.sandbox.validator import adapter_files
from tests.engine.adapters.random_adapters import peft_config, peft_tensors, random_arrays, tiny_spec, write_peft

SPEC = tiny_spec()
PICKLE = b"\x80\x04."
_STATE = {"trainer_state.json": '{"global_step": 60, "log_history": []}', "training_args.bin": PICKLE}
_CHECKPOINT = {"optimizer.pt": PICKLE, "scheduler.pt": PICKLE, "rng_state.pth": PICKLE, **_STATE}

#: A trainer: what it writes beside the adapter, and its own keys of the configuration.
TRAINERS: dict[str, tuple[dict[str, str | bytes], dict[str, object]]] = {
    "unsloth": (
        {"README.md": "---\nlibrary_name: peft\n---\n", "chat_template.jinja": "{{ messages[0]['content'] }}"},
        {
            "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama"},
            "target_modules": r"(?:.*?(?:language|text).*?)?(?:.*\.)?(?:self_attn|mlp)\.(?:q_proj|up_proj)",
            "ensure_weight_tying": True,
            "lora_dropout": 0,
        },
    ),
    "axolotl": (
        {
            "README.md": "axolotl version: `0.13.0`",
            "config.json": '{"model_type": "llama"}',
            "adapter_model.bin": PICKLE,
            "debug.log": "",
            "tokens_state.json": "{}",
            **_STATE,
        },
        {"corda_config": None, "eva_config": None, "exclude_modules": None, "qalora_group_size": 16},
    ),
    "LLaMA-Factory": (
        {
            "README.md": "",
            "all_results.json": "{}",
            "train_results.json": "{}",
            "trainer_log.jsonl": "{}\n",
            "training_loss.png": b"\x89PNG",
            "special_tokens_map.json": "{}",
            **_STATE,
        },
        {"loftq_config": {}, "megatron_config": None, "megatron_core": "megatron.core", "layer_replication": None},
    ),
    "ms-swift": (
        {
            "README.md": "",
            "additional_config.json": '{"lora_dtype": null, "lorap_lr_ratio": null, "lorap_emb_lr": 1e-06}',
            "args.json": '{"model": "m", "train_type": "lora"}',
            "logging.jsonl": "{}\n",
            **_CHECKPOINT,
        },
        {"target_modules": r"^(model(?=\.).*\.(up_proj|q_proj))$", "exclude_modules": r"^visual(?=\.).*$"},
    ),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainers_folder_is_read_as_it_is(tmp_path: Path, trainer: str) -> None:
    files, keys = TRAINERS[trainer]
    tensors = peft_tensors(random_arrays(SPEC, 2, ["q_proj", "up_proj"]))
    config = peft_config(2, ["q_proj", "up_proj"], lora_alpha=6)
    plain = read_adapter(write_peft(tmp_path / "plain", config, tensors), SPEC).card
    folder = write_peft(tmp_path / "output", config | keys, tensors)
    write_peft(folder / "checkpoint-60", config | keys, tensors)
    for place, contents in ((folder, files), (folder / "checkpoint-60", files | _CHECKPOINT)):
        for name, text in contents.items():
            (place / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        card = read_adapter(place, SPEC).card
        assert card.digest == plain.digest
        assert not {path.suffix for path in adapter_files(place)} & {".bin", ".pt", ".pth"}
        template = json.loads(card.text)["chat_template"] if card.text else None
        assert template == files.get("chat_template.jinja")
