"""A small random model with a real tokenizer, and random adapters for it: what end-to-end tests serve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN * KV_HEADS // HEADS),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_model(folder: Path, *, max_positions: int = 1024, seed: int = 0, num_heads: int = HEADS) -> None:
    """A two-layer Llama and a byte-level BPE of some 400 tokens. `num_heads` divides the same widths."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog, again and again and again"] * 4, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads * KV_HEADS // HEADS,
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def save_adapter(folder: Path, *, rank: int, seed: int, targets: Sequence[str] = tuple(SHAPES)) -> None:
    """A PEFT folder with random weights, strong enough to change most tokens."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for target in targets:
            d_in, d_out = SHAPES[target]
            name = f"base_model.model.model.layers.{layer}.{target}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, d_in), np.float32)
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((d_out, rank), np.float32) * np.float32(0.1)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({target.rsplit(".", 1)[-1] for target in targets}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
