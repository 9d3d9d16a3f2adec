"""Time to first token of an adapter's call in a conversation: activated LoRA compared with LoRA.

The base has answered in the conversation, so its blocks are cached; then comes a call: the same conversation and an
invocation. With LoRA the adapter computes the whole conversation again, with activated LoRA only from the invocation
on. Each round has its own conversation, the engine serves nothing else, and rounds are interleaved.

    python -m load_tests.engine.bench_activated --tokens 1000
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from app.engine.api import LLM
from app.engine.config import EngineConfig
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from app.engine.request import SamplingParams
from load_tests.random_adapters import write_random_adapter
from load_tests.stats import environment, numbers, ratios, rounds, spread

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Settings:
    """The command line, checked. `num_invocation`: tokens of the invocation, with which a call ends."""

    model: Path
    lengths: tuple[int, ...] = (1000,)
    rank: int = 16
    num_invocation: int = 4
    num_rounds: int = 5
    seed: int = 0


def run(settings: Settings) -> str:
    """Measure everything; the Markdown. Raises ValueError if the activated adapter found less than whole blocks."""
    before = environment()
    config = EngineConfig(num_kv_blocks=4 * settings.num_rounds * (-(-max(settings.lengths) // 16) + 2))
    lines = []
    with tempfile.TemporaryDirectory() as folder, LLM(settings.model, config) as llm:
        invocation = tuple(range(11, 11 + settings.num_invocation))
        paths = {
            "LoRA": write_random_adapter(Path(folder) / "plain", llm.spec, settings.rank, settings.seed),
            "activated LoRA": _write_activated(Path(folder) / "activated", llm, settings, invocation),
        }
        for length in settings.lengths:
            call = _Call(llm, length, invocation, settings.seed)
            for path in paths.values():
                call.time_ms(path)  # reads and writes the adapter
            values = rounds({name: partial(call.time_ms, path) for name, path in paths.items()}, settings.num_rounds)
            ratio = ratios(values["LoRA"], values["activated LoRA"])
            line = " | ".join(str(spread(values[name])) for name in paths)
            lines.append(f"| {length} | {line} | {ratio} |")
    return "\n".join(
        [
            f"{before['cpu']}, {before['num_cpus']} CPUs, commit {before['commit']}; load average before "
            f"{before['load_average']}, after {environment()['load_average']}; {settings.num_rounds} interleaved "
            f"rounds; rank {settings.rank} on every module, an invocation of {settings.num_invocation} tokens.",
            "",
            "| tokens of conversation | LoRA, ms | activated LoRA, ms | LoRA / activated |",
            "|---:|---:|---:|---:|",
            *lines,
        ]
    )


class _Call:
    """A call on a conversation that the base has cached, a new one each time."""

    def __init__(self, llm: LLM, length: int, invocation: tuple[int, ...], seed: int) -> None:
        self._llm = llm
        self._length = length
        self._invocation = list(invocation)
        self._seeds = itertools.count(seed)

    def time_ms(self, adapter: Path) -> float:
        """Milliseconds until the first token."""
        rng = np.random.default_rng([next(self._seeds), self._length])
        conversation: list[int] = rng.integers(100, self._llm.spec.vocab_size, self._length).tolist()
        self._llm.generate([conversation], None, _ONE_TOKEN)
        generate = partial(self._llm.generate, [conversation + self._invocation], adapter, _ONE_TOKEN)
        started_s = time.perf_counter()
        (answer,) = generate()
        took_ms = (time.perf_counter() - started_s) * 1000
        is_activated = bool(self._llm.load_adapter(adapter).card.invocation_tokens)
        expected = self._length // 16 * 16 if is_activated else 0
        if answer.usage.cached_tokens != expected:
            raise ValueError(f"{answer.usage.cached_tokens} tokens were found in the cache, not {expected}")
        return took_ms


def _write_activated(folder: Path, llm: LLM, settings: Settings, invocation: tuple[int, ...]) -> Path:
    """The same adapter with an invocation."""
    write_random_adapter(folder, llm.spec, settings.rank, settings.seed)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": list(invocation)}))
    return folder


def main() -> None:
    """Command line."""
    defaults = Settings(Path())
    parser = argparse.ArgumentParser(description="Time to first token of activated LoRA compared with LoRA.")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="path or source URI of the base")
    parser.add_argument("--tokens", type=numbers, default=defaults.lengths, help="1000,4000: of the conversation")
    parser.add_argument("--rank", type=int, default=defaults.rank)
    parser.add_argument("--rounds", type=int, default=defaults.num_rounds)
    options = parser.parse_args()
    model = resolve_model(options.model)
    print(run(Settings(model, tuple(options.tokens), options.rank, num_rounds=options.rounds)))


if __name__ == "__main__":
    main()
