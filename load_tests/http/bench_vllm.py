"""What polylora costs in front of vLLM: the same requests to a service with `engine.vllm` and to `vllm serve` alone.

Both run vLLM from one environment with the same arguments, base and adapters; those that are not measured are idle.
With `--ray`, Ray Serve LLM serves the base over the same vLLM, too: it loads adapters from object storage only.
Rounds are interleaved and ratios taken within a round (`stats.py`). Prompts are new in every run, so the prefix cache
never helps. The client runs on the same machine. Prints tokens/s from the first request to the last token, the time to
the first token, and the CPU time per token of polylora's processes besides vLLM.

    python -m load_tests.http.bench_vllm --vllm /opt/vllm/bin/python --streams 1,8,32
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import DEFAULT_MODEL_URI, resolve_model
from load_tests.engine.reference import load_transformers
from load_tests.engine.vllm_reference import write_model
from load_tests.http.client import Endpoint, closed_loop
from load_tests.http.lengths import words
from load_tests.http.workload import PlannedRequest
from load_tests.process_tree import cpu_seconds
from load_tests.random_adapters import write_random_adapters
from load_tests.service import ROOT, Service, end_session, free_port, serve_arguments, settings_with
from load_tests.stats import environment, numbers, ratios, rounds, spread

POLYLORA, VLLM, RAY = "polylora", "vLLM", "Ray Serve LLM"
NUM_ADAPTERS, RANK = 8, 16
BASE = "base"
#: Longer than any prompt and answer of a measurement.
MAX_MODEL_LEN = 512
#: vLLM compiles nothing on CPUs with LoRA.
EXTRA_ARGS: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}


class Case(NamedTuple):
    """Which server, base only or eight adapters in turn, how many streams."""

    system: str
    with_adapters: bool
    num_streams: int


class Bench:
    """Both servers' addresses, and what runs have shown besides their rate."""

    def __init__(
        self, urls: Mapping[str, str], adapters: Sequence[str], num_tokens: int, per_stream: int, seed: int
    ) -> None:
        """`urls` by system, ending in /v1; they serve `BASE` and `adapters`. Each stream sends `per_stream` requests
        of `num_tokens` tokens."""
        self._endpoints = {system: Endpoint(url, extra_body={"ignore_eos": True}) for system, url in urls.items()}
        self.systems = frozenset(urls)
        self._adapters, self._num_tokens, self._per_stream = adapters, num_tokens, per_stream
        self._rng = np.random.default_rng(seed)
        self.first_s: dict[Case, list[float]] = defaultdict(list)
        #: CPU microseconds per token by kind of process: one value per run.
        self.cpu_us: dict[Case, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.session_id: int | None = None

    def measure(self, case: Case) -> float:
        """Tokens per second over the whole run. Raises RuntimeError when a request fails."""
        count = case.num_streams * self._per_stream
        models = [self._adapters[i % len(self._adapters)] if case.with_adapters else BASE for i in range(count)]
        requests = [
            PlannedRequest(index, 0.0, model, "bench", words(24, self._rng), self._num_tokens)
            for index, model in enumerate(models)
        ]
        before = self._cpu_seconds(case)
        outcomes = asyncio.run(closed_loop(self._endpoints[case.system], requests, case.num_streams))
        for outcome in outcomes:
            if outcome.error is not None or outcome.completion_tokens != self._num_tokens:
                raise RuntimeError(f"{case}: {outcome.error or f'{outcome.completion_tokens} tokens'}")
            self.first_s[case].append(outcome.ttft_s)
        num_tokens = count * self._num_tokens
        for role, used in self._cpu_seconds(case).items():
            self.cpu_us[case][role].append((used - before.get(role, 0.0)) / num_tokens * 1e6)
        return num_tokens / (max(outcome.done_s for outcome in outcomes) - min(outcome.due_s for outcome in outcomes))

    def _cpu_seconds(self, case: Case) -> Mapping[str, float]:
        return cpu_seconds(self.session_id) if self.session_id is not None and case.system == POLYLORA else {}


def run(bench: Bench, streams: Sequence[int], num_rounds: int, log: Callable[[str], None]) -> str:
    """Measure; `log` gets a line per run. Returns the Markdown table."""
    systems = {False: [system for system in (VLLM, POLYLORA, RAY) if system in bench.systems], True: [VLLM, POLYLORA]}
    cases = [Case(system, lora, n) for lora in systems for n in streams for system in systems[lora]]

    def measure(case: Case) -> float:
        value = bench.measure(case)
        log(f"{case.system}, {'adapters' if case.with_adapters else 'base'}, {case.num_streams} streams: {value:.2f}")
        return value

    for case in cases:
        bench.measure(case)  # connections, adapters, compiled code
    bench.first_s.clear()
    bench.cpu_us.clear()
    values = rounds({case: partial(measure, case) for case in cases}, num_rounds)
    lines = [
        "| adapters | streams | vLLM, tokens/s | polylora / vLLM | Ray Serve LLM / vLLM | "
        "first token p50/p99, vLLM | polylora | Ray Serve LLM | polylora's CPU |",
        "|---|---:|---:|---|---|---:|---:|---:|---|",
    ]
    for lora in (False, True):
        for n in streams:
            alone, ours = Case(VLLM, lora, n), Case(POLYLORA, lora, n)
            ray = Case(RAY, lora, n)
            ratio, other = (
                str(ratios(values[each], values[alone])) if each in values else "not measured" for each in (ours, ray)
            )
            used = ", ".join(
                f"{role} {spread(each).median:.0f}"
                for role, each in sorted(bench.cpu_us[ours].items(), key=lambda item: -spread(item[1]).median)
                if spread(each).median >= 1
            )
            rate = f"{spread(values[alone]).median:.1f}"
            first = " | ".join(_percentiles(bench.first_s[case]) for case in (alone, ours, ray))
            lines.append(
                f"| {NUM_ADAPTERS if lora else 'base'} | {n} | {rate} | {ratio} | {other} | {first} | {used} |"
            )
    return "\n".join(lines)


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "not measured"
    p50, p99 = np.percentile(seconds, (50, 99))
    return f"{p50 * 1000:.0f}/{p99 * 1000:.0f} ms"


@contextmanager
def vllm_serve(python: Path, model: Path, adapters: Sequence[Path], max_num_seqs: int, log: Path) -> Iterator[str]:
    """`vllm serve` with what polylora's engine has; its address."""
    port = free_port()
    modules = [f"{folder.name}={folder}" for folder in adapters]
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", BASE),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--generation-config", "vllm"),
        *("--max-num-seqs", str(max_num_seqs), "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(EXTRA_ARGS["kv_cache_memory_bytes"]), "--disable-uvicorn-access-log"),
        *("--enable-lora", "--max-loras", str(NUM_ADAPTERS), "--max-cpu-loras", str(NUM_ADAPTERS)),
        *("--max-lora-rank", str(RANK), "--lora-modules", *modules),
    ]
    with _serving(command, port, log) as url:
        yield url


@contextmanager
def ray_serve_llm(python: Path, model: Path, max_num_seqs: int, log: Path) -> Iterator[str]:
    """Ray Serve LLM with the same vLLM and base, without adapters; its address. Its Ray is a cluster of its own."""
    port = free_port()
    engine_kwargs = {
        **{"dtype": "float32", "max_num_seqs": max_num_seqs, "max_model_len": MAX_MODEL_LEN, **EXTRA_ARGS},
        **{"generation_config": "vllm", "distributed_executor_backend": "uni"},
    }
    script = log.with_name("ray_serve_llm.py")
    script.write_text(_RAY_SCRIPT)
    folder = tempfile.mkdtemp(prefix="plr", dir="/tmp")  # a short path, for Ray's sockets
    given = {"port": port, "model": str(model), "name": BASE, "engine_kwargs": engine_kwargs, "folder": folder}
    try:
        with _serving([str(python), str(script), json.dumps(given)], port, log) as url:
            yield url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_RAY_SCRIPT = """
import json, sys, time
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

given = json.loads(sys.argv[1])
ray.init(num_cpus=4, include_dashboard=False, _temp_dir=given["folder"])
serve.start(http_options={"host": "127.0.0.1", "port": given["port"]})
source = {"model_id": given["name"], "model_source": given["model"]}
config = LLMConfig(
    model_loading_config=source, accelerator_config={"kind": "cpu"}, engine_kwargs=given["engine_kwargs"],
    deployment_config={"num_replicas": 1, "max_ongoing_requests": 1000},
)
serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)
"""


@contextmanager
def _serving(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """A server in a session of its own, from when it is ready."""
    own = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    own.pop("PYTHONPATH", None)
    with log.open("wb") as printed:
        process = subprocess.Popen(command, env=own, stdout=printed, stderr=printed, start_new_session=True)
    try:
        _wait_until_ready(process, port, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        end_session(process.pid)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Raises RuntimeError with what it printed if it ends instead, or is not ready in ten minutes."""
    deadline_s = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"{log.stem} is not ready:\n{log.read_text(errors='replace')[-4000:]}")


def settings(python: Path, model: Path, adapters: Sequence[Path], max_num_seqs: int, folder: Path) -> Path:
    """A settings file for polylora over the same vLLM, in `folder`."""
    section = {
        "python": str(python),
        "dtype": "float32",
        "max_loras": NUM_ADAPTERS,
        "max_lora_rank": RANK,
        "extra_args": EXTRA_ARGS,
    }

    def change(args: dict[str, Any]) -> None:
        args["model"] = {"uri": str(model), "name": BASE}
        args["engine"] = {"max_num_seqs": max_num_seqs, "max_model_len": MAX_MODEL_LEN, "vllm": section}
        preload = [{"name": path.name, "path": str(path)} for path in adapters]
        args["adapters"] = {"roots": [str(adapters[0].parent)], "preload": preload}
        args.pop("semantic_router", None)

    return settings_with(ROOT / "configs/serve.yaml", folder, change)


def write_base(uri: str, folder: Path) -> Path:
    """A base in GGUF as a float32 folder with its tokenizer; a folder as it is."""
    from transformers import AutoTokenizer

    path = resolve_model(uri)
    if path.is_dir():
        return path
    written = write_model(load_transformers(path), folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(written)
    return written


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="Python of an environment with vLLM")
    parser.add_argument("--ray", type=Path, help="Python of an environment with the same vLLM and Ray 2.60")
    parser.add_argument("--model", default=DEFAULT_MODEL_URI, help="a base in GGUF, or a folder")
    parser.add_argument("--streams", type=numbers, default=(1, 8, 32))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--per-stream", type=int, default=2, help="requests of each stream in a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    most = max(given.streams)
    with tempfile.TemporaryDirectory(prefix="plv") as name, ExitStack() as stack:
        folder = Path(name)
        model = write_base(given.model, folder / "model")
        adapters = write_random_adapters(
            folder / "adapters", load_checkpoint(model).spec, NUM_ADAPTERS, (RANK,), given.seed
        )
        alone = stack.enter_context(vllm_serve(given.vllm, model, adapters, most, folder / "vllm.log"))
        port = free_port()
        path = settings(given.vllm, model, adapters, most, folder)
        service = stack.enter_context(Service(serve_arguments(str(path), port)))
        service.wait_for("Ready after", timeout_s=1200)
        urls = {VLLM: alone, POLYLORA: f"http://127.0.0.1:{port}/v1"}
        if given.ray is not None:
            urls[RAY] = stack.enter_context(ray_serve_llm(given.ray, model, most, folder / "ray.log"))
        bench = Bench(urls, [path.name for path in adapters], given.tokens, given.per_stream, given.seed)
        bench.session_id = service.process.pid
        machine = environment()
        table = run(bench, given.streams, given.rounds, lambda line: print(line, flush=True))
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}.\n\n{table}"
    )


if __name__ == "__main__":
    main()
