"""Speculative decoding: its gain where an answer repeats its input, and its cost elsewhere.

Two engines, one with `engine.speculative_decoding: off` and one with `auto`, answer the same greedy requests in turns
in each round, with cached prompts; their answers must have the same tokens. Elsewhere means free text at 1, 8 and 32
streams.

    python -m load_tests.engine.bench_speculation
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.adapter_chat import encode_chat
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.formats.reading import read_adapter
from app.engine.config import CpuConfig, EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend, load_vocabulary
from app.engine.models.chat.chat_template_sandbox import ChatTemplateSandbox
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from app.engine.request import GenerateRequest, SamplingParams
from app.engine.structured_output.grammar_builder import json_grammar
from load_tests.stats import environment, ratios, rounds, spread

_CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        total = total + item.price * item.quantity
    total = total * (1 + tax_rate)
    return round(total, 2)


def print_receipt(items, tax_rate):
    for item in items:
        print(item.name, item.quantity, item.price)
    print("Total:", total_price(items, tax_rate))
"""
_EDIT = f"Rename tax_rate to vat in this program. Answer with the whole program and nothing else.\n\n{_CODE}"
_MESSAGES = (
    "Hello, my name is Clara Sato. I would like nine desk lamps sent to Cork on Friday.",
    "Please deliver 14 garden chairs to Lisbon on Tuesday. Best wishes, Amir Novak",
    "This is Mara Lindqvist from Oslo, could you bring six coffee grinders on Monday?",
    "Order for Porto: 25 picture frames. Contact is Jonas Weber.",
)
_FREE = (
    "Tell me a story about a lighthouse keeper who finds a strange map.",
    "Explain why the sky is blue to a curious child.",
    "What should I think about before I move to another city?",
    "Write a short letter to a friend whom you have not seen for years.",
)
_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("customer_name", "ordered_item", "destination")},
    "required": ["customer_name", "ordered_item", "destination"],
    "additionalProperties": False,
}  # fmt: skip

#: The schema of the demo adapter's answers.
_OWN_SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": ["integer" if name == "quantity" else "string", "null"]}
        for name in ("name", "item", "quantity", "city", "day")
    },
    "required": ["name", "item", "quantity", "city", "day"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Settings:
    """The command line, checked. `adapter`: the folder of the demo adapter, or one for the same base."""

    model: Path
    adapter: Path
    num_tokens: int = 192
    num_rounds: int = 5
    num_threads: int = 0
    streams: tuple[int, ...] = (1, 8, 32)


class Case(NamedTuple):
    """Prompts that are answered together, with an adapter or none, a grammar or none, and a prediction or none."""

    prompts: tuple[str, ...]
    has_adapter: bool = False
    grammar: str = ""
    prediction: str = ""
    at_once: bool = False


def cases(settings: Settings) -> dict[str, Case]:
    """The cases by their names in the table."""
    return {
        "edit, base": Case((_EDIT,)),
        "edit, base, with the program as prediction": Case((_EDIT,), prediction=_CODE),
        "extraction, adapter": Case(_MESSAGES, has_adapter=True),
        "extraction, adapter, by its schema": Case(
            _MESSAGES, has_adapter=True, grammar=json_grammar(_OWN_SCHEMA, "schema")
        ),
        "extraction, base, by a schema": Case(_MESSAGES, grammar=json_grammar(_SCHEMA, "schema")),
    } | {
        f"free text, {count} stream{'s' * (count > 1)}": Case(
            tuple(_FREE[i % len(_FREE)] + " " * (i // len(_FREE)) for i in range(count)), at_once=True
        )
        for count in settings.streams
    }


class Answering:
    """One engine with one setting."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, adapter: LoraAdapter, num_tokens: int) -> None:
        self._engine, self._tokenizer, self._num_tokens = engine, tokenizer, num_tokens
        self._adapter, self._ref = adapter, AdapterRef("extract", adapter.card.digest, "bench")
        self._count, self._templates = 0, ChatTemplateSandbox()
        self.answers: dict[str, list[list[int]]] = {}
        self.tokens_per_cpu_s: list[float] = []  # of every call of `tokens_per_s`; all threads of the process count

    def tokens_per_s(self, name: str, case: Case) -> float:
        """All prompts of a case, one after the other or at once; from the first submit to the last token."""
        groups = [case.prompts] if case.at_once else [(prompt,) for prompt in case.prompts]
        started_s, cpu_s = time.perf_counter(), time.process_time()
        answers = [answer for group in groups for answer in self._answer_all(group, case)]
        taken_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        self.answers[name] = answers
        num_tokens = sum(map(len, answers))
        self.tokens_per_cpu_s.append(num_tokens / cpu_s)
        return num_tokens / taken_s

    def _answer_all(self, prompts: Sequence[str], case: Case) -> list[list[int]]:
        answers: dict[str, list[int]] = {}
        prediction = tuple(self._tokenizer.encode(case.prediction)) if case.prediction else ()
        for prompt in prompts:
            self._count += 1
            answers[str(self._count)] = []
            message = [{"role": "user", "content": prompt}]
            token_ids = tuple(encode_chat(self._tokenizer, message, AdapterTokenizer.from_json(""), self._templates))
            sampling = SamplingParams(max_tokens=self._num_tokens, temperature=0.0, grammar=case.grammar)
            self._engine.submit(
                GenerateRequest(
                    str(self._count), "bench", token_ids, sampling, self._ref if case.has_adapter else None,
                    prediction_ids=prediction,
                ),
                self._adapter if case.has_adapter else None,
            )  # fmt: skip
        num_open = len(answers)
        while num_open:
            for chunk in self._engine.step():
                if chunk.error is not None:
                    raise chunk.error
                answers[chunk.request_id] += chunk.token_ids
                num_open -= chunk.finish_reason is not None
        return list(answers.values())


def run(settings: Settings) -> str:
    """Measure everything; the Markdown."""
    before = environment()
    checkpoint = load_checkpoint(settings.model)
    tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    adapter = read_adapter(settings.adapter, checkpoint.spec)
    found: dict[str, Answering] = {}
    engines = []
    settings_of: tuple[Literal["off", "auto"], ...] = ("off", "auto")
    for speculative_decoding in settings_of:
        config = EngineConfig(
            cpu=CpuConfig(num_threads=settings.num_threads),
            lora_pool_rows=64,
            max_model_len=min(1024, checkpoint.spec.max_positions),
            num_kv_blocks=64 * (max(settings.streams) + 4),
            speculative_decoding=speculative_decoding,
        )
        engine = Engine(load_backend(checkpoint, config), config, grammars=partial(load_vocabulary, checkpoint))
        found[speculative_decoding] = Answering(engine, tokenizer, adapter, settings.num_tokens)
        engines.append(engine)
    lines = []
    for name, case in cases(settings).items():
        measured = {
            speculative_decoding: partial(each.tokens_per_s, name, case) for speculative_decoding, each in found.items()
        }
        for one in measured.values():
            one()
        earlier = engines[1].stats()
        for each in found.values():
            each.tokens_per_cpu_s.clear()
        values = rounds(measured, settings.num_rounds)
        per_cpu = {speculative_decoding: each.tokens_per_cpu_s for speculative_decoding, each in found.items()}
        later = engines[1].stats()
        if found["off"].answers[name] != found["auto"].answers[name]:
            raise AssertionError(f"{name}: answers differ with draft tokens")
        num_draft_tokens = later.num_draft_tokens - earlier.num_draft_tokens
        num_accepted = later.num_accepted_tokens - earlier.num_accepted_tokens
        off, auto = (spread(values[speculative_decoding]).median for speculative_decoding in found)
        num_tokens = later.num_tokens_generated - earlier.num_tokens_generated
        lines.append(
            f"| {name} | {off:.0f} | {auto:.0f} | {ratios(values['auto'], values['off'])} "
            f"| {ratios(per_cpu['auto'], per_cpu['off'])} "
            f"| {num_draft_tokens / num_tokens:.2f} | {num_accepted / num_tokens:.2f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)  # a run that is broken off has measured something, too
    for engine in engines:
        engine.close()
    return "\n".join(
        [
            f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
            f"{before['load_average']}, after {environment()['load_average']}; {settings.num_rounds} interleaved "
            f"rounds, answers of up to {settings.num_tokens} tokens, the same ones with off and auto.",
            "",
            "| | off, tokens/s | auto, tokens/s | auto / off | per CPU second | drafted per token | accepted |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *lines,
        ]
    )


def main() -> None:
    """Command line."""
    defaults = Settings(Path(), Path("examples/adapters/extract"))
    parser = argparse.ArgumentParser(description="Gain and cost of speculative decoding.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base model")
    parser.add_argument("--adapter", type=Path, default=defaults.adapter, help="a folder saved by PEFT")
    parser.add_argument("--tokens", type=int, default=defaults.num_tokens)
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    model = resolve_model(given.model)
    print(run(Settings(model, given.adapter, given.tokens, given.rounds, given.threads)))


if __name__ == "__main__":
    main()
