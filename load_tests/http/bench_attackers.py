"""Effect of three attackers on another tenant's time to the first token over HTTP.

A service is started as `make serve` does, with keys. The victim keeps `--streams` small requests open: alone, beside
each attacker, and beside all three at once. Each attacker has a project of its own:

- slow bodies: 2,000 connections from other addresses that send half a request and open again when they are closed;
- templates: 8 connections that let an adapter's chat template run until its limit, and end in an error;
- queue: 24 connections that ask for 64 answers of 400 tokens each.

Cases take turns; the ratio of the 99th percentiles is within a round. Attackers, victim and service share the machine.
A victim's request that is refused ends the program with RuntimeError.

    python -m load_tests.http.bench_attackers --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from app.cli.config_file import read_settings
from app.config import ADMIN_KEY
from app.deployments.tenancy.auth.key_crypto import new_key
from load_tests.http.bench_adversary import project_key, projects_of
from load_tests.http.client import Endpoint, Outcome, closed_loop
from load_tests.http.lengths import words
from load_tests.http.workload import PlannedRequest
from load_tests.service import ROOT, Service, free_port, serve_arguments
from load_tests.stats import environment, ratios, rounds, spread

NUM_SLOW, NUM_TEMPLATES, NUM_QUEUED = 2000, 8, 24
#: Addresses of the slow clients, as if they were on other machines.
ADDRESSES = [f"127.0.0.{number}" for number in range(2, 6)]
SLOW_TEMPLATE = (
    "{% for i in range(16000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}{{ raise_exception('no') }}"
)
#: Words of the victim's prompts, tokens of its answers.
NUM_WORDS, NUM_TOKENS = 32, 32
#: Seconds that attackers run before the victim begins, and that the service has afterwards.
LEAD_S, AFTER_S = 5.0, 5.0
ALONE = "alone"


class Attackers:
    """What each attacker does until it is cancelled, and the statuses that it was given."""

    def __init__(self, url: str, model: str, keys: dict[str, str]) -> None:
        self._url, self._model, self._keys = url, model, keys
        self.statuses: dict[str, Counter[str]] = {name: Counter() for name in self.by_name}

    @property
    def by_name(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {"slow bodies": self._slow_bodies, "templates": self._templates, "queue": self._queue}

    async def _slow_bodies(self) -> None:
        parts = urlsplit(self._url)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self._keys['slow bodies']}\r\nContent-Length: 1000\r\n\r\n{{"
        ).encode()

        async def hold(index: int) -> None:
            await asyncio.sleep(index / 1000)
            while True:
                with contextlib.suppress(OSError):
                    address = ADDRESSES[index % len(ADDRESSES)]
                    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, local_addr=(address, 0))
                    try:
                        writer.write(head)
                        line = await reader.readline()
                        self.statuses["slow bodies"][line[9:12].decode() or "closed"] += 1
                    finally:
                        writer.close()
                await asyncio.sleep(0.5)

        await asyncio.gather(*map(hold, range(NUM_SLOW)))

    async def _templates(self) -> None:
        body = {"model": "slow-template", "messages": [{"role": "user", "content": "hi"}]}
        await self._repeat("templates", "/tokenize", body, NUM_TEMPLATES)

    async def _queue(self) -> None:
        body = {"model": self._model, "prompt": "once upon a time", "n": 64, "max_tokens": 400, "ignore_eos": True}
        await self._repeat("queue", "/v1/completions", body | {"temperature": 1}, NUM_QUEUED)

    async def _repeat(self, name: str, path: str, body: Mapping[str, object], number: int) -> None:
        headers = {"Authorization": f"Bearer {self._keys[name]}"}
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

            async def again_and_again() -> None:
                while True:
                    try:
                        async with session.post(self._url + path, json=body) as response:
                            await response.read()
                            self.statuses[name][str(response.status)] += 1
                    except (aiohttp.ClientError, TimeoutError) as error:
                        self.statuses[name][type(error).__name__] += 1
                    await asyncio.sleep(0.01)

            await asyncio.gather(*(again_and_again() for _ in range(number)))


class Bench:
    """A running service, the victim's key, and times by case: 99th percentile to the first token, in seconds."""

    def __init__(self, attackers: Attackers, endpoint: Endpoint, model: str, num_streams: int, num_requests: int):
        self._attackers, self._endpoint, self._model = attackers, endpoint, model
        self._num_streams, self._num_requests = num_streams, num_requests
        self._rng = np.random.default_rng(0)
        names = list(attackers.by_name)
        self.cases = {ALONE: [], **{f"beside {name}": [name] for name in names}, "beside all three": names}

    def measure(self, case: str) -> float:
        started = time.monotonic()
        value = asyncio.run(self._measure(self.cases[case]))
        print(f"{case}: {value * 1e3:.0f} ms, after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        return value

    async def _measure(self, names: list[str]) -> float:
        running = [asyncio.ensure_future(self._attackers.by_name[name]()) for name in names]
        await asyncio.sleep(LEAD_S if names else 0)
        try:
            outcomes = await self._ask()
        finally:
            for attack in running:
                attack.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.sleep(AFTER_S if names else 0)
        return float(np.percentile([outcome.ttft_s for outcome in outcomes], 99))

    async def _ask(self) -> list[Outcome]:
        requests = [
            PlannedRequest(index, 0.0, self._model, "victim", words(NUM_WORDS, self._rng), NUM_TOKENS)
            for index in range(self._num_requests)
        ]
        outcomes = await closed_loop(self._endpoint, requests, self._num_streams)
        for outcome in outcomes:
            if outcome.error is not None:
                raise RuntimeError(f"the victim was refused: {outcome.error}")
        return outcomes


def add_slow_template(url: str, key: str, project: str, roots: Path) -> None:
    """Load the demo adapter "sql" with a slow chat template, from the project's folder, as `slow-template`."""
    folder = roots / project / "slow"
    shutil.copytree(ROOT / "examples" / "adapters" / "sql", folder)
    (folder / "chat_template.jinja").write_text(SLOW_TEMPLATE, encoding="utf-8")

    async def load() -> None:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"name": "slow-template", "path": f"{project}/slow"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{url}/v1/loras?wait=true", json=body) as response,
        ):
            if response.status >= 300:
                raise RuntimeError(f"the adapter was not loaded: {response.status}: {await response.text()}")

    asyncio.run(load())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A tenant's time to the first token beside three attackers.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "serve.yaml")
    parser.add_argument("--streams", type=int, default=4, help="streams of the victim")
    parser.add_argument("--requests", type=int, default=100, help="requests of the victim in each round")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 10_000), most))
    port, admin_key, machine = free_port(), new_key(is_admin=True).value, environment()
    with (
        tempfile.TemporaryDirectory() as roots,
        Service(serve_arguments(str(given.config), port), {ADMIN_KEY: admin_key, "LORA_PATH": roots}) as service,
    ):
        service.wait_for("Ready after")
        url, model = f"http://127.0.0.1:{port}", read_settings(given.config).model.name
        projects = projects_of(f"{url}/v1", admin_key)
        ids = {name: projects.create(name=name).id for name in ("victim", "slow bodies", "templates", "queue")}
        keys = {name: project_key(projects, project) for name, project in ids.items()}
        add_slow_template(url, keys["templates"], ids["templates"], Path(roots))
        attackers = Attackers(url, model, keys)
        endpoint = Endpoint(f"{url}/v1", default_key=keys["victim"], extra_body={"ignore_eos": True})
        bench = Bench(attackers, endpoint, model, given.streams, given.requests)
        bench.measure(ALONE)
        results = rounds({case: partial(bench.measure, case) for case in bench.cases}, given.rounds)
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}. {given.streams} streams, {given.requests} requests a round, {given.rounds} "
        "rounds.\n\n| the victim's requests | p99 first token, ms | / alone |\n|---|---:|---:|"
    )
    for case, values in results.items():
        print(f"| {case} | {spread(values).median * 1e3:.0f} | {ratios(values, results[ALONE])} |")
    for name, statuses in attackers.statuses.items():
        print(f"\n{name} were answered {dict(statuses)}")


if __name__ == "__main__":
    main()
