"""What watching costs a service: an open page of the console, and traces that are exported.

A service is started as `make serve` does, with traces for a collector in this process that accepts everything. An open
page is one stream of events, as the browser reads it. Its cost is the CPU time that each kind of process takes more
with it than without it, in percent of a core: at rest for some seconds, and while the same number of requests is
answered. A trace's cost is that of the same requests with a client's `traceparent` that is sampled, against one that is
not. Cases take turns (`stats.py`). CPU time counts, so a busy machine disturbs less than it does rates.

    pip install 'polylora[otlp]' && python -m load_tests.http.bench_console --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import aiohttp
import numpy as np

from app.cli.config_file import read_settings
from load_tests.http.lengths import words
from load_tests.process_tree import cpu_seconds
from load_tests.service import ROOT, Service, free_port, serve_arguments
from load_tests.stats import environment, ratios, rounds, spread

PAGE, TRACED, PLAIN = "an open page", "traced", "neither"
ROLES = ("ingress", "store", "placement", "engine", "haproxy")
#: A trace that the client samples, and one that it does not.
SAMPLED, NOT_SAMPLED = (f"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flag}" for flag in ("01", "00"))


@asynccontextmanager
async def open_page(session: aiohttp.ClientSession, url: str) -> AsyncIterator[list[int]]:
    """An open page; gives a list that gets the size of each event."""
    sizes: list[int] = []

    async def follow() -> None:
        since = 0
        while True:
            query = {"stream": "true", "since": str(since)}
            async with session.get(f"{url}/v1/overview", params=query, headers={"X-Polylora-Console": "1"}) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        sizes.append(len(line))
                        since = max([since, *json.loads(line[6:])["samples"]["times"]])

    following = asyncio.create_task(follow())
    try:
        yield sizes
    finally:
        if following.done():
            following.result()  # it ends by an error only
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


class Bench:
    """A service with traces, whose processes are those of a session."""

    def __init__(self, url: str, session_id: int, model: str, *, num_requests: int, num_streams: int, rest_s: float):
        self._url, self._session_id, self._model = url, session_id, model
        self._num_requests, self._num_streams, self._rest_s = num_requests, num_streams, rest_s
        self._rng = np.random.default_rng(0)
        #: (case, at rest) -> role -> percent of a core, one value per round.
        self.percents: dict[tuple[str, bool], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        #: Case -> CPU microseconds of the ingress per request.
        self.ingress_us: dict[str, list[float]] = defaultdict(list)

    def measure(self, case: str, is_at_rest: bool) -> float:
        """Seconds that it took. Raises aiohttp.ClientError when a request fails."""
        return asyncio.run(self._measure(case, is_at_rest))

    async def _measure(self, case: str, is_at_rest: bool) -> float:
        async with aiohttp.ClientSession() as session:
            if case != PAGE:
                return await self._run(session, case, is_at_rest)
            async with open_page(session, self._url) as sizes:
                async with asyncio.timeout(60):
                    while not sizes:  # the first event has an hour of samples, and is sent once
                        await asyncio.sleep(0.1)
                return await self._run(session, case, is_at_rest)

    async def _run(self, session: aiohttp.ClientSession, case: str, is_at_rest: bool) -> float:
        before, started_s = cpu_seconds(self._session_id), time.perf_counter()
        if is_at_rest:
            await asyncio.sleep(self._rest_s)
        else:
            await self._answer(session, SAMPLED if case == TRACED else NOT_SAMPLED)
        took_s, after = time.perf_counter() - started_s, cpu_seconds(self._session_id)
        for role in ROLES:
            self.percents[case, is_at_rest][role].append((after[role] - before[role]) / took_s * 100)
        if not is_at_rest:
            self.ingress_us[case].append((after["ingress"] - before["ingress"]) / self._num_requests * 1e6)
        return took_s

    async def _answer(self, session: aiohttp.ClientSession, traceparent: str) -> None:
        """Send the requests of a round, `num_streams` at a time."""
        prompts = iter([words(16, self._rng) for _ in range(self._num_requests)])

        async def stream() -> None:
            for prompt in prompts:
                body = {"model": self._model, "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
                headers = {"traceparent": traceparent}
                async with session.post(f"{self._url}/v1/completions", json=body, headers=headers) as answer:
                    answer.raise_for_status()
                    await answer.read()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_streams):
                group.create_task(stream())


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, Callable[[], int]]]:
    """An OTLP endpoint that accepts everything; gives its URL and the number of bytes that it got."""
    sizes: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sizes.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", lambda: sum(sizes)
    finally:
        server.shutdown()
        server.server_close()


def table(bench: Bench, took_s: dict[tuple[str, bool], list[float]]) -> str:
    """What was measured, in Markdown."""
    lines = [f"| percent of a core | {' | '.join(ROLES)} | all |", f"|---|{'---:|' * (len(ROLES) + 1)}"]
    for case, is_at_rest in [(PAGE, True), (PAGE, False), (TRACED, False)]:
        values, base = bench.percents[case, is_at_rest], bench.percents[PLAIN, is_at_rest]
        # Of rates, the work of a second differs with its speed: scaled to the same number of requests.
        scale = [a / b for a, b in zip(took_s[case, is_at_rest], took_s[PLAIN, is_at_rest], strict=True)]
        more = [float(np.median(np.multiply(values[role], scale) - base[role])) for role in ROLES]
        name = f"{case}, {'at rest' if is_at_rest else 'under load'}: more by"
        lines.append(f"| {name} | {' | '.join(f'{each:+.2f}' for each in [*more, sum(more)])} |")
    slower = ratios(took_s[TRACED, False], took_s[PLAIN, False])
    traced, plain = (spread(bench.ingress_us[case]).median for case in (TRACED, PLAIN))
    text = f"Traced, the same requests take {slower} of the time, and the ingress {traced:.0f} us of CPU for one; "
    return "\n".join([*lines, "", f"{text}{plain:.0f} without a trace."])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "serve.yaml")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200, help="in each round, of each case")
    parser.add_argument("--rest-s", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    print(asyncio.run(run(parser.parse_args())))


async def run(given: argparse.Namespace) -> str:
    """Everything that is printed."""
    machine, port = environment(), free_port()
    model = read_settings(given.config).model.name
    async with collector() as (endpoint, num_bytes):
        with Service(serve_arguments(str(given.config), port), {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}) as service:
            service.wait_for("Ready after")
            bench = Bench(
                f"http://127.0.0.1:{port}", service.process.pid, model,
                num_requests=given.requests, num_streams=given.streams, rest_s=given.rest_s,
            )  # fmt: skip
            cases = [(PLAIN, True), (PAGE, True), (PLAIN, False), (PAGE, False), (TRACED, False)]
            await asyncio.to_thread(bench.measure, PLAIN, False)
            bench.percents.clear()
            bench.ingress_us.clear()
            took_s = await asyncio.to_thread(
                rounds, {case: partial(bench.measure, *case) for case in cases}, given.rounds
            )
    return (
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}. {given.requests} requests of 16 tokens, "
        f"{given.streams} at a time, {given.rounds} rounds; the collector got {num_bytes()} bytes.\n\n"
        f"{table(bench, took_s)}"
    )


if __name__ == "__main__":
    main()
