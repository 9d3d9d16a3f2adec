"""A small mixture of experts and two adapters of it, trained from scratch in minutes on two cores.

Writes `model/`, a Qwen3-MoE of 2.6 million parameters with a tokenizer of characters, and `adapters/`: `reverse`, on
attention, router and experts, and `ascending`, on experts only. The sign before a word is the base model's task:
"=word" copies it, "<word" reverses it, ">word" sorts its letters. A word without a sign is copied. Each adapter changes
what a word without a sign means, so that an answer shows which adapter made it. Held-out words are in no training set.

    python -m examples.training.mixture --out build/mixture
"""

from __future__ import annotations

import argparse
import string
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

LETTERS = string.ascii_lowercase[:16]
PAD, END, ANSWER = "<pad>", "<end>", ":"
VOCABULARY = [PAD, END, ANSWER, "=", "<", ">", *LETTERS]
LONGEST, HELD_OUT = 7, 200
TEMPLATE = "{{ messages[-1]['content'] }}{% if add_generation_prompt %}:{% endif %}"

Transform = Callable[[str], str]
TASKS: dict[str, Transform] = {"=": str, "<": lambda word: word[::-1], ">": lambda word: "".join(sorted(word))}
ADAPTERS: dict[str, tuple[Transform, dict[str, Any]]] = {
    "reverse": (
        TASKS["<"],
        {"target_modules": "all-linear", "r": 4, "lora_alpha": 8},
    ),
    "ascending": (
        TASKS[">"],
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "r": 8,
         "lora_alpha": 16},
    ),
}  # fmt: skip


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; prompts end with ":"."""
    inner = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=PAD, unk_token=PAD)
    found.chat_template = TEMPLATE
    return found


def new_model() -> Qwen3MoeForCausalLM:
    """Four layers of eight experts, of which a token uses two."""
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY), hidden_size=128, intermediate_size=192, moe_intermediate_size=192,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def words(rng: Random, count: int, *, held_out: bool) -> list[str]:
    """Random words; those whose letters add up to a multiple of eleven are held out of training."""
    found: list[str] = []
    while len(found) < count:
        word = "".join(rng.choices(LETTERS, k=rng.randint(3, LONGEST)))
        if (sum(map(LETTERS.index, word)) % 11 == 0) == held_out:
            found.append(word)
    return found


def _batch(pairs: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T], and labels that are -100 but for the answers."""
    rows, labels = [], []
    for prompt, answer in pairs:
        asked = [VOCABULARY.index(char) for char in prompt + ANSWER]
        said = [*(VOCABULARY.index(char) for char in answer), 1]
        rows.append(asked + said)
        labels.append([-100] * len(asked) + said)
    width = max(map(len, rows))
    padded = [row + [0] * (width - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor([row + [-100] * (width - len(row)) for row in labels])


def fit(model: Any, ask: Callable[[Random], tuple[str, str]], num_steps: int, rate: float, *, seed: int) -> None:
    """Train what requires gradients on answers to `ask`; prints the loss now and then."""
    rng, started = Random(seed), time.monotonic()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=num_steps, pct_start=0.1)
    for step in range(1, num_steps + 1):
        token_ids, labels = _batch([ask(rng) for _ in range(64)])
        loss = model(input_ids=token_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}/{num_steps} loss {loss.item():.4f} {time.monotonic() - started:.0f} s", flush=True)


def ask_base(rng: Random) -> tuple[str, str]:
    """A prompt and its answer: a word with the sign of a task, or a word without a sign, which is copied."""
    (word,) = words(rng, 1, held_out=False)
    sign = rng.choice([*TASKS, ""])
    return sign + word, TASKS.get(sign, str)(word)


@torch.inference_mode()
def pass_rate(model: Any, transform: Transform, sign: str = "") -> float:
    """Pass rate on held-out words; greedy, and the whole answer must be right."""
    passed = 0
    for word in words(Random(7), HELD_OUT, held_out=True):
        prompt = torch.tensor([[VOCABULARY.index(char) for char in sign + word + ANSWER]])
        answer = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LONGEST + 1, do_sample=False,
            eos_token_id=1, pad_token_id=0,
        )[0, prompt.shape[1] :].tolist()  # fmt: skip
        passed += "".join(VOCABULARY[token] for token in answer if token > 1) == transform(word)
    return passed / HELD_OUT


def train(out: Path, *, base_steps: int, adapter_steps: int) -> list[str]:
    """Write everything below `out`; returns a Markdown table of held-out pass rates."""
    torch.manual_seed(0)
    base = new_model()
    fit(base.train(), ask_base, base_steps, 3e-3, seed=0)
    base.eval()
    base.to(torch.bfloat16).to(torch.float32)  # what is saved, to the bit
    base.to(torch.bfloat16).save_pretrained(out / "model")
    new_tokenizer().save_pretrained(out / "model")
    base.to(torch.float32)
    lines = ["| | held-out words |", "|---|---|"]
    lines += [f"| base, `{sign}word` | {pass_rate(base, transform, sign):.1%} |" for sign, transform in TASKS.items()]
    for name, (transform, settings) in ADAPTERS.items():
        before = pass_rate(base, transform)

        def ask(rng: Random, transform: Transform = transform) -> tuple[str, str]:
            (word,) = words(rng, 1, held_out=False)
            return word, transform(word)

        with warnings.catch_warnings():  # PEFT looks for the ranks of fused experts among modules only, and warns
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **settings))
        fit(model.train(), ask, adapter_steps, 5e-3, seed=1)
        model.eval()
        model.save_pretrained(out / "adapters" / name)
        lines.append(f"| word alone, base | {before:.1%} |")
        lines.append(f"| word alone, `{name}` | {pass_rate(model, transform):.1%} |")
        base = model.unload()
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train a small mixture of experts and two adapters of it.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base-steps", type=int, default=1500)
    parser.add_argument("--adapter-steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    steps = {"base_steps": arguments.base_steps, "adapter_steps": arguments.adapter_steps}
    print("\n".join(train(arguments.out.expanduser(), **steps)))


if __name__ == "__main__":
    main()
