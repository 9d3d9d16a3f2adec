"""Quality of each `engine.cpu.compute`, and of KV memory in bfloat16, beside float32: perplexity, divergence, and pass
rates of the demo adapters.

The text is the documentation strings of Python's standard library, in windows of 256 tokens that see nothing before
them. KL: of a rounded distribution from float32's, nats per token. Pass rates: greedy answers to each demo task's
held-out prompts.

    python -m load_tests.engine.compute_quality --tokens 100000 --prompts 80 --only "float32, KV in bfloat16"

`--llama-cpp PYTHON` (of an environment with llama-cpp-python) adds llama.cpp's perplexity of the same file.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from app.engine.api import LLM
from app.engine.config import Compute, CpuConfig, EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.models.tokenizers.tokenizer import load_tokenizer
from app.engine.request import SamplingParams
from examples.training.recipes import RECIPES
from examples.training.task import examples
from load_tests.engine.llama_cpp_reference import LlamaCppDecoder
from load_tests.engine.steps import Piece, forward_batch, greedy
from load_tests.stats import environment

WINDOW = 256
_COMPARED = (*(CpuConfig(compute=one) for one in get_args(Compute)), CpuConfig(kv_cache_dtype="bfloat16"))
#: What is compared, by `EngineConfig.arithmetic`; float32 first.
ARITHMETICS = {EngineConfig(cpu=cpu).arithmetic: cpu for cpu in _COMPARED}
_ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"


def doc_strings() -> Iterator[str]:
    """Yield those of the standard library's modules, classes and functions, in the order of their files."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield text


def token_windows(model: Path, num_tokens: int) -> NDArray[np.int32]:
    """[N, WINDOW] token ids of the text."""
    tokenizer, ids = load_tokenizer(model), list[int]()
    for text in doc_strings():
        if len(ids) >= num_tokens:
            break
        ids += tokenizer.encode(text + "\n\n", add_special_tokens=False)
    count = min(len(ids), num_tokens) // WINDOW
    return np.array(ids[: count * WINDOW], np.int32).reshape(count, WINDOW)


def log_probabilities(backend: CpuBackend, window: NDArray[np.int32]) -> NDArray[np.float32]:
    """[WINDOW, V]: of the token after each one of the window."""
    batch = forward_batch([Piece(window, 0, np.arange(WINDOW // 16))], 16)
    rows = np.arange(WINDOW, dtype=np.int32)
    backend.forward(replace(batch, sample_rows=rows, sample_seqs=0 * rows, sampling=greedy(WINDOW)))
    logits = backend.logits(WINDOW)
    logits = logits - logits.max(axis=1, keepdims=True)
    found: NDArray[np.float32] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(
        np.float32
    )
    return found


def config_of(cpu: CpuConfig) -> EngineConfig:
    """An engine that gives the logits of every token of a window in one step."""
    return EngineConfig(
        cpu=cpu,
        lora_pool_rows=0,
        max_loras=1,
        num_kv_blocks=WINDOW // 16,
        max_num_seqs=WINDOW,
        max_num_batched_tokens=WINDOW,
    )


def divergence(model: Path, num_tokens: int, others: Sequence[str], llama_cpp: Path | None = None) -> str:
    """A line for each of these rounded arithmetics with both perplexities and the divergence, and one for llama.cpp."""
    checkpoint, backends = load_checkpoint(model), dict[str, CpuBackend]()
    for name in ("float32", *others):
        backends[name] = CpuBackend(checkpoint.spec, checkpoint.tensors(), config_of(ARITHMETICS[name]))
    losses: dict[str, list[Any]] = {name: [] for name in backends}
    distances, agree = ({name: list[Any]() for name in others} for _ in range(2))
    peer, peer_losses = None, list[float]()
    if llama_cpp is not None:
        log = Path(tempfile.gettempdir()) / "llama_cpp.log"
        threads = os.cpu_count() or 1
        peer = LlamaCppDecoder(llama_cpp, model, log, max_streams=1, max_length=WINDOW, num_threads=threads)
    for window in token_windows(model, num_tokens):
        if peer is not None:
            peer_losses += peer.losses(window.tolist())
        found = {name: log_probabilities(backend, window)[:-1] for name, backend in backends.items()}
        for name, rows in found.items():
            losses[name].append(-rows[np.arange(WINDOW - 1), window[1:]].astype(np.float64))
        plain = found["float32"]
        for name in others:
            rounded = found[name]
            distances[name].append((np.exp(plain) * (plain - rounded)).sum(axis=1, dtype=np.float64))
            agree[name].append(plain.argmax(axis=1) == rounded.argmax(axis=1))
        if len(losses["float32"]) % 40 == 0:
            print("\n".join(_summary(one, losses, distances, agree) for one in others), file=sys.stderr)
    for backend in backends.values():
        backend.close()
    lines = [_summary(name, losses, distances, agree) for name in others]
    if peer is not None:
        peer.close()
        plain = np.concatenate(losses["float32"])
        change = np.array(peer_losses) - plain
        lines.append(
            f"llama.cpp: perplexity {np.exp(np.mean(peer_losses)):.3f} ({100 * np.expm1(change.mean()):+.2f} %, "
            f"standard error {100 * change.std() / len(change) ** 0.5:.2f})"
        )
    return "\n".join(lines)


def _summary(
    name: str, losses: dict[str, list[Any]], distances: dict[str, list[Any]], agree: dict[str, list[Any]]
) -> str:
    plain, rounded = np.concatenate(losses["float32"]), np.concatenate(losses[name])
    kl, same = np.concatenate(distances[name]), np.concatenate(agree[name])
    change, error = np.mean(rounded - plain), np.std(rounded - plain) / len(plain) ** 0.5
    return (
        f"{len(plain)} tokens: perplexity {np.exp(plain.mean()):.3f} in float32, {np.exp(rounded.mean()):.3f} in "
        f"{name} ({100 * (np.exp(change) - 1):+.2f} %, standard error {100 * error:.2f}); KL {kl.mean():.5f} nats "
        f"per token, 99th percentile {np.percentile(kl, 99):.4f}; same most likely token {same.mean():.2%}"
    )


def passes(model: Path, cpu: CpuConfig, num_prompts: int) -> dict[str, int]:
    """Passed held-out prompts of each demo task whose adapter belongs to this base."""
    config = EngineConfig(cpu=cpu, max_num_seqs=16, max_queued_requests=num_prompts)
    counts = {}
    with LLM(model, config) as llm:
        for name, recipe in RECIPES.items():
            held_out = examples(recipe.task, "heldout", num_prompts, 0)
            prompts = [_prompt(llm, recipe.task.system, one.before, one.prompt) for one in held_out]
            sampling = SamplingParams(max_tokens=recipe.task.max_new_tokens, temperature=0.0)
            answers = llm.generate(prompts, _ADAPTERS / name, sampling)
            counts[name] = sum(
                recipe.task.check(one, answer.text) is None for one, answer in zip(held_out, answers, strict=True)
            )
    return counts


def _prompt(llm: LLM, system: str | None, before: Sequence[tuple[str, str]], prompt: str) -> list[int]:
    turns = ([] if system is None else [("system", system)]) + [*before, ("user", prompt)]
    text = llm.tokenizer.render_chat([{"role": role, "content": content} for role, content in turns])
    return llm.tokenizer.encode(text, add_special_tokens=False)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Quality of the CPU engine's rounded arithmetics.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--tokens", type=int, default=100_000, help="0: no perplexity")
    parser.add_argument("--llama-cpp", type=Path, help="Python of an environment with llama-cpp-python")
    parser.add_argument("--prompts", type=int, default=80, help="of each demo task; 0: no pass rates")
    parser.add_argument("--only", choices=list(ARITHMETICS)[1:], help="this one beside float32; by default all")
    given = parser.parse_args()
    others = [given.only] if given.only else list(ARITHMETICS)[1:]
    model = resolve_model(given.model)
    print(environment())
    if given.tokens:
        print(divergence(model, given.tokens, others, given.llama_cpp), flush=True)
    if given.prompts:
        for name in ("float32", *others):
            print(f"{name}: passed of {given.prompts}: {passes(model, ARITHMETICS[name], given.prompts)}", flush=True)


if __name__ == "__main__":
    main()
