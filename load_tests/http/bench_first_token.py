"""Time to the first token over HTTP on an idle service, by the place of the request's adapter.

A service is started as `make serve` does, with random adapters of one rank. Prints milliseconds for the base, and for
adapters on the device, in host memory, and on disk only (with a warm page cache); ratios within a round to the adapter
on the device. Each adapter's place is checked before use. Prompts are new, so the prefix cache never helps.

    python -m load_tests.http.bench_first_token --rounds 9
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from app.cli.config_file import read_settings
from app.engine.models.checkpoint import load_checkpoint
from app.engine.models.download.model_download import resolve_model
from load_tests.http.client import Endpoint, closed_loop
from load_tests.http.lengths import words
from load_tests.http.workload import PlannedRequest
from load_tests.random_adapters import write_random_adapters
from load_tests.service import ROOT, Service, free_port, serve_arguments, settings_with_adapters
from load_tests.stats import environment, ratios, rounds, spread

BASE, DEVICE, HOST, DISK = "base", "adapter on the device", "adapter in host memory", "adapter on disk"
#: Adapters that host memory has room for: fewer than are registered after those that are to be on disk only.
HOST_ROOM = 4
NUM_TOKENS = 4


class Bench:
    """A running service and the adapters that are still cold. All methods raise RuntimeError when it refuses."""

    def __init__(self, url: str, base_name: str, folders: list[Path], num_rounds: int, num_words: int) -> None:
        self._url, self._base_name, self._num_words = url, base_name, num_words
        self._rng = np.random.default_rng(0)
        warm, *others = folders
        self._warm = warm.name
        on_disk, self._unknown = others[:num_rounds], iter(others[num_rounds:])
        for folder in on_disk:
            self._register(folder)
        for _ in range(HOST_ROOM):
            self._register(next(self._unknown))
        self._register(warm)
        self._on_disk: Iterator[Path] = iter(on_disk)
        for model in (base_name, self._warm):  # connections, compiled code
            self._first_token_ms(model)

    def base(self) -> float:
        return self._first_token_ms(self._base_name)

    def device(self) -> float:
        self._must_be(self._warm, on_device=True, on_host=None)
        return self._first_token_ms(self._warm)

    def host(self) -> float:
        folder = next(self._unknown)
        self._register(folder)
        self._must_be(folder.name, on_device=False, on_host=True)
        return self._first_token_ms(folder.name)

    def disk(self) -> float:
        folder = next(self._on_disk)
        self._must_be(folder.name, on_device=False, on_host=False)
        return self._first_token_ms(folder.name)

    def _first_token_ms(self, model: str) -> float:
        time.sleep(0.5)  # what the last request left to do
        prompt = words(self._num_words, self._rng)
        request = PlannedRequest(
            index=0, arrival_s=0.0, model=model, tenant="bench", prompt=prompt, max_tokens=NUM_TOKENS
        )
        (outcome,) = asyncio.run(closed_loop(Endpoint(self._url, extra_body={"ignore_eos": True}), [request], 1))
        if outcome.error is not None:
            raise RuntimeError(f"{model}: {outcome.error}")
        return outcome.ttft_s * 1e3

    def _register(self, folder: Path) -> None:
        self._ask("loras", {"name": folder.name, "path": str(folder), "wait": True})

    def _must_be(self, name: str, *, on_device: bool, on_host: bool | None) -> None:
        residency = self._ask(f"loras/{name}")["residency"]
        found = bool(residency["replicas"]), residency["host"]
        if found[0] != on_device or on_host not in (None, found[1]):
            raise RuntimeError(f"{name} is on the device: {found[0]}, in host memory: {found[1]}; not as planned")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)


def run(config: Path, rank: int, num_rounds: int, num_words: int) -> str:
    """Measure; the Markdown table."""
    model = read_settings(config).model
    spec = load_checkpoint(resolve_model(model.uri), model.name).spec
    num_adapters = 1 + 2 * num_rounds + HOST_ROOM
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = write_random_adapters(folder / "adapters", spec, num_adapters, [rank], seed=0, bf16=True)
        size_bytes = (folders[0] / "adapter_model.safetensors").stat().st_size
        host_bytes = HOST_ROOM * size_bytes + size_bytes // 2
        adapters = {"roots": [str(folder / "adapters")], "host_cache_bytes": host_bytes}
        settings = settings_with_adapters(config, folder, adapters)
        port = free_port()
        with Service(serve_arguments(str(settings), port)) as service:
            service.wait_for("Ready after")
            bench = Bench(f"http://127.0.0.1:{port}/v1", model.name, folders, num_rounds, num_words)
            cases = {BASE: bench.base, DEVICE: bench.device, HOST: bench.host, DISK: bench.disk}
            values = rounds(cases, num_rounds)
    lines = ["| | first token, ms | / adapter on the device |", "|---|---:|---:|"]
    for case, times in values.items():
        middle, ratio = spread(times), ratios(times, values[DEVICE])
        lines.append(f"| {case} | {middle.median:.0f} ({middle.low:.0f} to {middle.high:.0f}) | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time to the first token, by where the adapter is.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "serve.yaml")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-words", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    machine = environment()
    table = run(arguments.config, arguments.rank, arguments.rounds, arguments.prompt_words)
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}. Adapters of rank {arguments.rank} over all "
        f"projections, bf16; {arguments.prompt_words} words of prompt; {arguments.rounds} rounds.\n\n{table}"
    )


if __name__ == "__main__":
    main()
