"""Cost of answers with a schema: masks in a step, compiling, and the effect of a slow schema on others.

The engine runs alone. All streams decode, first free and then with a schema, in turns in each round; then schemas of
random names are compiled; then free streams decode while grammars that are slow on purpose are submitted.

    python -m load_tests.engine.bench_structured --streams 32
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend, load_vocabulary
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.request import GenerateRequest, SamplingParams
from app.engine.structured_output.grammar_builder import client_lark_grammar, json_grammar
from load_tests.stats import environment, spread

#: A grammar in which one text has ever more derivations.
SLOW = "start: a a a a\na: (b b b b | b b b)+\nb: (/[a-z]+/ | /[a-z ]+/ | c)+\nc: b b | /[a-z]/"


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    model: Path
    num_streams: int = 32
    num_tokens: int = 64
    num_rounds: int = 5
    num_schemas: int = 200
    num_attacks: int = 20


def schema(name: str) -> dict[str, Any]:
    """A nested object with strings, numbers, an array, a pattern and an enumeration; its end is far away."""
    inner = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["zip"]}
    fields = {
        name: {"type": "string", "minLength": 400},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "address": inner | {"additionalProperties": False},
        "kind": {"enum": ["a", "b", "c"]},
    }
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


class Streams:
    """Requests of one engine, and how long its steps take."""

    def __init__(self, settings: Settings, engine: Engine, vocab_size: int) -> None:
        self._settings, self._engine, self._vocab_size = settings, engine, vocab_size
        self._count = 0

    def submit(self, grammar: str, num_tokens: int) -> str:
        self._count += 1
        prompt = tuple((self._count * 31 + i * 7) % self._vocab_size for i in range(8))
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0.8, seed=self._count, ignore_eos=not grammar, grammar=grammar
        )
        self._engine.submit(GenerateRequest(f"r{self._count}", "bench", prompt, sampling))
        return f"r{self._count}"

    def decode(self, grammar: str, attacks: tuple[str, ...] = ()) -> list[float]:
        """Seconds of each step in which all streams decode; an attack comes with every third of them."""
        settings, left = self._settings, list(attacks)
        live = {self.submit(grammar, settings.num_tokens) for _ in range(settings.num_streams)}
        attackers: set[str] = set()
        seconds, decoding = list[float](), set[str]()
        while live:
            if left and len(seconds) % 3 == 2:
                attackers.add(self.submit(left.pop(), 8))
            started_s = time.perf_counter()
            chunks = self._engine.step()
            took_s = time.perf_counter() - started_s
            if live <= decoding and chunks:
                seconds.append(took_s)
            decoding |= {chunk.request_id for chunk in chunks}
            ended = {chunk.request_id for chunk in chunks if chunk.finish_reason is not None}
            live -= ended
            attackers -= ended
        for request_id in attackers:
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step()
        return seconds


def run(settings: Settings) -> str:
    """The report."""
    checkpoint = load_checkpoint(settings.model)
    config = EngineConfig(max_num_seqs=settings.num_streams + 4, speculative_decoding="off")
    engine = Engine(load_backend(checkpoint, config), config, grammars=partial(load_vocabulary, checkpoint))
    vocabulary = load_vocabulary(checkpoint)
    streams = Streams(settings, engine, checkpoint.spec.vocab_size)
    constrained = json_grammar(schema("name"), "schema")
    attack = client_lark_grammar(SLOW, "grammar")
    for grammar in ("", constrained):
        streams.decode(grammar)
    free_ms, masked_ms, attacked_ms = [], [], []
    for number in range(settings.num_rounds):
        free_ms.append(1000 * float(np.median(streams.decode(""))))
        masked_ms.append(1000 * float(np.median(streams.decode(constrained))))
        attacks = tuple(
            f"{attack[:-1]}{' ' * (number * settings.num_attacks + i)}}}" for i in range(settings.num_attacks)
        )
        attacked_ms.append(1000 * float(np.median(streams.decode("", attacks))))
    engine.close()
    compile_ms = []
    for number in range(settings.num_schemas):
        grammar = json_grammar(schema(f"name_{number}"), "schema")
        started_s = time.perf_counter()
        vocabulary.matcher(grammar, "bench")
        compile_ms.append(1000 * (time.perf_counter() - started_s))
    share = [100 * (masked / free - 1) for masked, free in zip(masked_ms, free_ms, strict=True)]
    more = [attacked - free for attacked, free in zip(attacked_ms, free_ms, strict=True)]
    lines = [
        f"{settings.num_streams} streams, {settings.num_rounds} rounds. {environment()}",
        "",
        "| | median (least to most) |",
        "|---|---|",
        f"| step of free streams, ms | {spread(free_ms)} |",
        f"| step of streams with a schema, ms | {spread(masked_ms)} |",
        f"| a schema's share of a step, % | {spread(share)} |",
        f"| what slow grammars add to others' step, ms | {spread(more)} |",
        f"| compiling, ms: median | {np.median(compile_ms):.2f} |",
        f"| compiling, ms: 99th percentile | {np.percentile(compile_ms, 99):.2f} |",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL_URI)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    print(run(Settings(model, num_streams=arguments.streams, num_rounds=arguments.rounds)))


if __name__ == "__main__":
    main()
