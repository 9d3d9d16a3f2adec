"""Tokens per second of answers with a schema, compared with free ones and with vLLM's CPU build, in one run.

All streams of a case decode greedily to the same length, which no schema's end cuts short; the whole time counts, with
prompts, grammars and speculation, at their defaults on both sides. vLLM takes part if its Python is given
(`vllm_reference.py`). Rounds are interleaved (`stats.py`), ratios are taken within a round, and the report says how
many answers of the two have the same tokens.

    python -m load_tests.engine.bench_schema_rates --streams 1,8,32 --vllm /path/to/python
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.factory import load_backend, load_vocabulary
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.structured_output.grammar_builder import json_grammar
from load_tests.decoding import EngineDecoder
from load_tests.engine.bench_structured import schema
from load_tests.engine.reference import load_transformers
from load_tests.engine.vllm_reference import VllmDecoder, write_model
from load_tests.stats import environment, numbers, ratios, rounds, spread

ENGINE, VLLM = "engine", "vLLM"
PROMPT_TOKENS = 24


class Case(NamedTuple):
    """A measurement: the system, whether answers have a schema, the number of streams."""

    system: str
    has_schema: bool
    num_streams: int


class Bench:
    """Both engines, their rates by case, and their last answers."""

    def __init__(self, model: Path, vllm: Path | None, folder: Path, streams: Sequence[int], num_tokens: int) -> None:
        self.cases = [
            Case(system, has_schema, count)
            for count in streams
            for system in (ENGINE, VLLM)[: 2 if vllm else 1]
            for has_schema in (False, True)
        ]
        self._num_tokens = num_tokens
        checkpoint = load_checkpoint(model)
        config = EngineConfig(max_num_seqs=max(streams))
        engine = Engine(load_backend(checkpoint, config), config, grammars=partial(load_vocabulary, checkpoint))
        grammars = {False: "", True: json_grammar(schema("name"), "schema")}
        self._ours = {has_schema: EngineDecoder(engine, grammar=grammar) for has_schema, grammar in grammars.items()}
        self._vllm = _open_vllm(vllm, model, folder, max(streams), num_tokens) if vllm else None
        rng = np.random.default_rng(0)
        self._prompts = rng.integers(1000, checkpoint.spec.vocab_size, (max(streams), PROMPT_TOKENS)).tolist()
        self._last: dict[Case, tuple[tuple[int, ...], ...]] = {}

    def rate(self, case: Case) -> float:
        """Tokens per second."""
        prompts, adapters = self._prompts[: case.num_streams], [None] * case.num_streams
        started_s = time.perf_counter()
        if case.system == ENGINE:
            decoded = self._ours[case.has_schema].decode(prompts, adapters, self._num_tokens)
        else:
            assert self._vllm is not None
            json_schema = schema("name") if case.has_schema else None
            decoded = self._vllm.decode(prompts, adapters, self._num_tokens, json_schema)
        took_s = time.perf_counter() - started_s
        short = [len(answer) for answer in decoded.token_ids if len(answer) != self._num_tokens]
        if short:
            raise RuntimeError(
                f"{case}: answers of {short} tokens instead of {self._num_tokens}: the rate says nothing"
            )
        self._last[case] = decoded.token_ids
        return case.num_streams * self._num_tokens / took_s

    def num_same(self, has_schema: bool, num_streams: int) -> int:
        """How many streams had the same tokens in both engines in the last round."""
        pair = (self._last[Case(system, has_schema, num_streams)] for system in (ENGINE, VLLM))
        return sum(one == other for one, other in zip(*pair, strict=True))

    def close(self) -> None:
        if self._vllm is not None:
            self._vllm.close()


def _open_vllm(python: Path, model: Path, folder: Path, max_streams: int, num_tokens: int) -> VllmDecoder:
    from transformers import AutoTokenizer

    written = write_model(load_transformers(model), folder / "model")
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(written)
    return VllmDecoder(
        python,
        written,
        (),
        max_rank=8,
        max_streams=max_streams,
        max_length=PROMPT_TOKENS + num_tokens,
        compiled=True,
        has_tokenizer=True,
    )


def table(bench: Bench, values: dict[Case, list[float]]) -> str:
    """What was measured, in Markdown."""
    lines = [
        "| streams | system | answers | tokens/s | of its free answers | of vLLM | the same tokens |",
        "|---:|---|---|---:|---|---|---:|",
    ]
    for case in bench.cases:
        free, other = case._replace(has_schema=False), case._replace(system=VLLM)
        of_free = str(ratios(values[case], values[free])) if case.has_schema else ""
        is_compared = case.system == ENGINE and other in values
        of_vllm = str(ratios(values[case], values[other])) if is_compared else ""
        same = str(bench.num_same(case.has_schema, case.num_streams)) if is_compared else ""
        answers = "schema" if case.has_schema else "free"
        rate = f"{spread(values[case]).median:.0f}"
        lines.append(f"| {case.num_streams} | {case.system} | {answers} | {rate} | {of_free} | {of_vllm} | {same} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="a base in GGUF")
    parser.add_argument("--streams", type=numbers, default=(1, 8, 32))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM, to measure it too")
    given = parser.parse_args()
    before: Any = environment()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(resolve_model(given.model), given.vllm, Path(folder), given.streams, given.tokens)
        for case in bench.cases:
            bench.rate(case)
        values = rounds({case: partial(bench.rate, case) for case in bench.cases}, given.rounds)
        bench.close()
    after = environment()["load_average"]
    print(
        f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
        f"{before['load_average']}, after {after}. {given.tokens} tokens a stream, {given.rounds} rounds.\n\n"
        f"{table(bench, values)}"
    )


if __name__ == "__main__":
    main()
