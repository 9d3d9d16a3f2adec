"""Effect of one tenant's flood on another over HTTP, with fairness and without.

A service is started as `make serve` does, with keys. Prints times to the first token and between tokens of a tenant's
requests: alone; beside another tenant that keeps `--adversary-factor` times as many streams open (fairness); and beside
the same flood sent with the tenant's own key (without: within a tenant requests are first come, first served). Cases
take turns, and ratios are within a round. Client and engine share the machine. `--url` measures a running server of any
engine that speaks OpenAI's API, without keys: alone, and beside the flood.

    python -m load_tests.http.bench_adversary --adversary-factor 10 --rounds 3
    python -m load_tests.http.bench_adversary --adversary-factor 10 --url http://127.0.0.1:8001/v1 --model base
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
from openai import OpenAI
from openai.resources.admin.organization.projects import Projects

from app.cli.config_file import read_settings
from app.config import ADMIN_KEY
from app.deployments.tenancy.auth.key_crypto import new_key
from load_tests.http.client import Endpoint, Outcome, closed_loop
from load_tests.http.lengths import words
from load_tests.http.workload import PlannedRequest
from load_tests.service import ROOT, Service, free_port, serve_arguments
from load_tests.stats import environment, ratios, rounds, spread

ALONE, FAIR, UNFAIR = "alone", "beside a flood of another tenant", "beside the same flood, without fairness"
#: The cases of a server without tenants.
CASES_WITHOUT_KEYS = (ALONE, UNFAIR)
#: Words of each prompt, and tokens of each answer.
NUM_WORDS, NUM_TOKENS = 32, 32
#: Seconds that the flood runs before the measurement starts.
LEAD_S = 2.0
#: Seconds after the flood in which its last requests end.
AFTER_S = 1.0


class Bench:
    """A running service and a key for each tenant. `measure` raises RuntimeError when a request is refused."""

    def __init__(
        self, url: str, keys: Mapping[str, str], model: str, num_streams: int, factor: int, num_requests: int
    ) -> None:
        """keys: those of the tenants `one` and `flood`; empty for a server without tenants."""
        self._url, self._keys, self._model = url, keys, model
        self._num_streams, self._factor, self._num_requests = num_streams, factor, num_requests
        self._rng = np.random.default_rng(0)
        #: Rounds by case: (99th percentile of the time to the first token, of the time between tokens).
        self.results: dict[str, list[tuple[float, float]]] = {
            case: [] for case in ((ALONE, FAIR, UNFAIR) if keys else CASES_WITHOUT_KEYS)
        }

    def measure(self, case: str) -> float:
        """Run one case once and add it to `results`; returns p99 of the time to the first token in seconds."""
        outcomes = asyncio.run(self._measure(case))
        gaps_s = [gap for outcome in outcomes for gap in outcome.gaps_s]
        first_s = float(np.percentile([outcome.ttft_s for outcome in outcomes], 99))
        self.results[case].append((first_s, float(np.percentile(gaps_s, 99))))
        return first_s

    async def _measure(self, case: str) -> list[Outcome]:
        flood = None
        if case != ALONE:
            sender = "flood" if case == FAIR else "one"
            num_streams = self._num_streams * self._factor
            flood = asyncio.create_task(self._ask(sender, 100 * num_streams, num_streams))
            await asyncio.sleep(LEAD_S)
        try:
            return await self._ask("one", self._num_requests, self._num_streams)
        finally:
            if flood is not None:
                flood.cancel()
                await asyncio.gather(flood, return_exceptions=True)
                await asyncio.sleep(AFTER_S)

    async def _ask(self, sender: str, num_requests: int, num_streams: int) -> list[Outcome]:
        requests = [
            PlannedRequest(
                index=index,
                arrival_s=0.0,
                model=self._model,
                tenant=sender,
                prompt=words(NUM_WORDS, self._rng),
                max_tokens=NUM_TOKENS,
            )
            for index in range(num_requests)
        ]
        endpoint = Endpoint(self._url, api_keys=self._keys, extra_body={"ignore_eos": True})
        outcomes = await closed_loop(endpoint, requests, num_streams)
        for outcome in outcomes:
            if outcome.error is not None:
                raise RuntimeError(f"{sender}: {outcome.error}")
        return outcomes


def tenant_keys(url: str, admin_key: str) -> dict[str, str]:
    """A key of a new project each for the tenant and the flood."""
    projects = projects_of(url, admin_key)
    return {name: project_key(projects, projects.create(name=name).id) for name in ("one", "flood")}


def projects_of(url: str, admin_key: str) -> Projects:
    """The official client for a service's projects."""
    return OpenAI(base_url=url, admin_api_key=admin_key, api_key="none").admin.organization.projects


def project_key(projects: Projects, project_id: str) -> str:
    """A new key of a project."""
    account = projects.service_accounts.create(project_id, name="bench")
    assert account.api_key is not None
    return account.api_key.value


@contextmanager
def keyed_service(config: Path) -> Iterator[tuple[str, Mapping[str, str], str]]:
    """A new service: its URL, a key for each tenant, and the base model's name."""
    port, admin_key = free_port(), new_key(is_admin=True).value
    with Service(serve_arguments(str(config), port), {ADMIN_KEY: admin_key}) as service:
        service.wait_for("Ready after")
        url = f"http://127.0.0.1:{port}/v1"
        yield url, tenant_keys(url, admin_key), read_settings(config).model.name


def table(bench: Bench) -> str:
    """The results, in Markdown."""
    lines = [
        "| a tenant's requests | p99 first token, ms | / alone | p99 between tokens, ms | / alone |",
        "|---|---:|---:|---:|---:|",
    ]
    for case, results in bench.results.items():
        cells = []
        for index in (0, 1):
            values, alone = [each[index] for each in results], [each[index] for each in bench.results[ALONE]]
            cells.append(f"{spread(values).median * 1e3:.0f} | {ratios(values, alone)}")
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A tenant's times during another's flood.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "serve.yaml")
    parser.add_argument("--adversary-factor", type=int, default=10, help="the flood's streams, of one of the tenant's")
    parser.add_argument("--streams", type=int, default=4, help="streams of the tenant")
    parser.add_argument("--requests", type=int, default=40, help="requests of the tenant in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="a server that runs, up to /v1, instead of a service of --config")
    parser.add_argument("--model", help="its name there")
    given = parser.parse_args()
    if (given.url is None) != (given.model is None):
        parser.error("--url and --model go together")
    machine = environment()
    service: AbstractContextManager[tuple[str, Mapping[str, str], str]] = (
        nullcontext((given.url, {}, given.model)) if given.url else keyed_service(given.config)
    )
    with service as asked:
        bench = Bench(*asked, given.streams, given.adversary_factor, given.requests)
        bench.measure(ALONE)
        bench.results[ALONE].clear()
        rounds({case: partial(bench.measure, case) for case in bench.results}, given.rounds)
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}. {given.streams} streams of a tenant, "
        f"{given.streams * given.adversary_factor} of the flood; {NUM_WORDS} words, {NUM_TOKENS} tokens; "
        f"{given.requests} requests a round, {given.rounds} rounds.\n\n{table(bench)}"
    )


if __name__ == "__main__":
    main()
