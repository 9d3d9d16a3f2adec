"""Cost of HTTP, text and Ray: the same requests through a running service and into an engine alone.

The service is started as `make serve` does, the engine alone is built in this process. Prints tokens/s of both, first
request to last token, and their ratio within a round; rounds are interleaved (`stats.py`) and the idle side uses no
CPU. Prompts are new in every round, so the prefix cache never helps. The client runs on the same machine and is part of
HTTP's cost. Also prints the CPU time per token of each of the service's processes. With `--url` a running service is
measured, without its processes.

    python -m load_tests.http.bench_http --config configs/serve.yaml --streams 1,8,32
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.cli.config_file import read_settings
from app.config import AppConfig
from app.engine.adapters.formats.reading import read_adapter
from app.engine.adapters.paths import resolve_adapter_path
from app.engine.engine import Engine
from app.engine.factory import load_backend
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import resolve_model
from app.engine.models.tokenizers.tokenizer import load_tokenizer
from load_tests.decoding import EngineDecoder
from load_tests.http.client import Endpoint, answers_s
from load_tests.http.lengths import words
from load_tests.process_tree import cpu_seconds
from load_tests.service import Service, free_port, serve_arguments
from load_tests.stats import environment, numbers, ratios, rounds, spread


class Case(NamedTuple):
    """Through HTTP or not, base only or base and adapters in turn, how many streams."""

    over_http: bool
    with_adapters: bool
    num_streams: int


class Bench:
    """The service and an engine alone. Raises PolyloraError for a configuration that does not load."""

    def __init__(
        self, config: AppConfig, url: str, session_id: int | None, num_prompt_words: int, num_tokens: int, seed: int
    ) -> None:
        checkpoint = load_checkpoint(resolve_model(config.model.uri), config.model.name)
        roots = [Path(root) for root in config.adapters.roots]
        adapters = [
            read_adapter(resolve_adapter_path(adapter.path, roots), checkpoint.spec)
            for adapter in config.adapters.preload
        ]
        self._decoder = EngineDecoder(Engine(load_backend(checkpoint, config.engine), config.engine), adapters)
        self._tokenizer = load_tokenizer(checkpoint.tokenizer_source)
        self._endpoint = Endpoint(url, extra_body={"ignore_eos": True})
        self._session_id = session_id
        #: CPU microseconds per token of each kind of process, by number of streams: one value per run over HTTP.
        self.cpu_us: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._base_name = config.model.name
        self._names = [adapter.name for adapter in config.adapters.preload]
        self._num_prompt_words, self._num_tokens = num_prompt_words, num_tokens
        self._rng = np.random.default_rng(seed)

    def measure(self, case: Case) -> float:
        """Tokens per second over the whole run. Raises RuntimeError when a request fails."""
        prompts = [words(self._num_prompt_words, self._rng) for _ in range(case.num_streams)]
        adapters: list[int | None] = [None] * case.num_streams
        if case.with_adapters:
            kinds = [None, *range(len(self._names))]
            adapters = [kinds[i % len(kinds)] for i in range(case.num_streams)]
        num_tokens = case.num_streams * self._num_tokens
        if case.over_http:
            before = self._cpu_seconds()
            models = [self._base_name if adapter is None else self._names[adapter] for adapter in adapters]
            seconds = answers_s(self._endpoint, models, prompts, self._num_tokens, case.num_streams)
            for role, used in self._cpu_seconds().items():
                self.cpu_us[case.num_streams][role].append((used - before.get(role, 0.0)) / num_tokens * 1e6)
            return num_tokens / seconds
        started = time.perf_counter()
        self._decoder.decode([self._tokenizer.encode(prompt) for prompt in prompts], adapters, self._num_tokens)
        return num_tokens / (time.perf_counter() - started)

    def _cpu_seconds(self) -> Mapping[str, float]:
        return {} if self._session_id is None else cpu_seconds(self._session_id)


def run(bench: Bench, streams: Sequence[int], num_rounds: int, log: Callable[[dict[str, object]], None]) -> str:
    """Measure; `log` gets each line of the JSON file. Returns the Markdown table."""
    cases = [Case(http, lora, n) for n in streams for lora in (False, True) for http in (False, True)]

    def measure(case: Case) -> float:
        value = bench.measure(case)
        log({"kind": "run", **case._asdict(), "tokens_per_s": round(value, 3)})
        return value

    for case in cases[-4:]:
        bench.measure(case)  # connections, adapters, compiled code
    bench.cpu_us.clear()
    values = rounds({case: partial(measure, case) for case in cases}, num_rounds)
    lines = [
        "| streams | adapters | engine alone, tokens/s | over HTTP, tokens/s | HTTP / engine alone |",
        "|---:|---|---:|---:|---|",
    ]
    for n in streams:
        for lora in (False, True):
            alone, http = values[Case(False, lora, n)], values[Case(True, lora, n)]
            ratio = ratios(http, alone)
            log({"kind": "ratio", "num_streams": n, "with_adapters": lora, **ratio._asdict()})
            used = "base and the adapters of the configuration in turn" if lora else "base"
            lines.append(f"| {n} | {used} | {spread(alone).median:.1f} | {spread(http).median:.1f} | {ratio} |")
    if roles := sorted({role for n in streams for role in bench.cpu_us[n]}):
        log({"kind": "cpu_us_per_token", "by_num_streams": bench.cpu_us})
        lines += ["", "| CPU per token, microseconds | " + " | ".join(f"{n} streams" for n in streams) + " |"]
        lines.append("|---|" + "---:|" * len(streams))
        for role in roles:
            medians = [spread(bench.cpu_us[n][role]).median for n in streams]
            lines.append(f"| {role} | " + " | ".join(f"{value:.0f}" for value in medians) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="The same requests over HTTP and into an engine alone.")
    parser.add_argument("--url", help="a service that runs already, ending in /v1; otherwise one is started")
    parser.add_argument("--config", type=Path, default=Path("configs/serve.yaml"), help="its settings file")
    parser.add_argument("--streams", type=numbers, default=(1, 8, 32))
    parser.add_argument("--prompt-words", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/bench_http.jsonl"))
    arguments = parser.parse_args()
    if arguments.url is not None:
        print(measure_all(arguments, arguments.url, None))
        return
    port = free_port()
    with Service(serve_arguments(str(arguments.config), port)) as service:
        service.wait_for("Ready after")
        print(measure_all(arguments, f"http://127.0.0.1:{port}/v1", service.process.pid))


def measure_all(arguments: argparse.Namespace, url: str, session_id: int | None) -> str:
    """Everything that is printed; the JSON lines are written on the way."""
    config = read_settings(arguments.config)
    bench = Bench(config, url, session_id, arguments.prompt_words, arguments.tokens, arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    machine = environment()
    with arguments.out.open("w") as file:

        def log(line: dict[str, object]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        log({"kind": "config", **settings, "app": config.model_dump(mode="json"), **machine})
        table = run(bench, arguments.streams, arguments.rounds, log)
        after = environment()["load_average"]
        log({"kind": "end", "load_average": after})
    return (
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {after}. {arguments.prompt_words} words of prompt, {arguments.tokens} "
        f"tokens, {arguments.rounds} interleaved rounds.\n\n{table}"
    )


if __name__ == "__main__":
    main()
