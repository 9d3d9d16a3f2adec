"""Cost of keys and limits per HTTP request, with many keys in the database.

A service is started as `make serve` does, with `http.auth: open`, so that requests with and without a key go through
the same processes. Prints requests per second with a key of a project that has rate limits (so high that none is
reached) and without a key, and the CPU time per request of the ingress and of the store, which leases limits. Cases
take turns, and ratios are within a round. Usage is recorded for both. A tick of the CPU's clock is 10 ms: differences
of microseconds need thousands of requests.

    python -m load_tests.http.bench_keys --keys 100000 --rounds 5
    python -m load_tests.http.bench_keys --metering     # only what metering adds to a request, in this process
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sqlalchemy import create_engine, insert, select
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.cli.config_file import read_settings
from app.config import ADMIN_KEY
from app.deployments.ingress.accounting import PricingContext, RequestAccounting
from app.deployments.ingress.http.middleware.metering import MeteringMiddleware
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.principal import STATE, Principal
from app.deployments.registry.db.tenant_tables import api_keys
from app.deployments.tenancy.auth.key_crypto import new_key
from app.deployments.tenancy.auth.tenant_mirror import TenantMirror
from app.deployments.tenancy.models import RateLimit, Tenant, TenantLimits
from app.deployments.tenancy.quota.address_limiter import AddressLimiter
from app.deployments.tenancy.quota.leases import LeaseGrant, LeaseRequest
from app.deployments.tenancy.usage.prices import Prices
from load_tests.http.bench_adversary import project_key, projects_of
from load_tests.http.client import Endpoint, closed_loop
from load_tests.http.lengths import words
from load_tests.http.workload import PlannedRequest
from load_tests.process_tree import cpu_seconds
from load_tests.service import ROOT, Service, free_port, serve_arguments, settings_with
from load_tests.stats import environment, ratios, rounds, spread

WITH, WITHOUT = "with a key and limits", "without"
ROLES = ("ingress", "store")
NUM_WORDS, NUM_TOKENS = 16, 16
#: Of everything that can be limited.
UNREACHED = 1_000_000_000


def limited_key(url: str, admin_key: str) -> str:
    """A key of a new project that has limits of rates."""
    projects = projects_of(url, admin_key)
    project = projects.create(name="bench")
    base = projects.rate_limits.list_rate_limits(project.id).data[0]
    projects.rate_limits.update_rate_limit(
        base.id,
        project_id=project.id,
        max_requests_per_1_minute=UNREACHED,
        max_tokens_per_1_minute=UNREACHED,
        max_requests_per_1_day=UNREACHED,
    )
    return project_key(projects, project.id)


def add_keys(database: Path, count: int) -> None:
    """So many more keys of the project that has one, in its database."""
    engine = create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        row = connection.execute(select(api_keys).where(api_keys.c.project_id.is_not(None))).mappings().one()
        fresh = (new_key(is_admin=False) for _ in range(count))
        rows = [
            {**row, "id": f"key_bench_{number}", "digest": key.digest, "redacted": key.redacted}
            for number, key in enumerate(fresh)
        ]
        connection.execute(insert(api_keys), rows)
    engine.dispose()


class Bench:
    """One service, asked with and without a key."""

    def __init__(self, url: str, session_id: int, key: str, model: str, num_streams: int, num_requests: int) -> None:
        self._session_id, self._model = session_id, model
        self._num_streams, self._num_requests = num_streams, num_requests
        self._endpoints = {
            WITH: Endpoint(url, default_key=key, extra_body={"ignore_eos": True}),
            WITHOUT: Endpoint(url, extra_body={"ignore_eos": True}),
        }
        self._rng = np.random.default_rng(0)
        #: Case -> role -> CPU microseconds per request, one value per round.
        self.cpu_us: dict[str, dict[str, list[float]]] = {
            case: {role: [] for role in ROLES} for case in (WITH, WITHOUT)
        }

    def measure(self, case: str) -> float:
        """Requests per second. Raises RuntimeError when a request fails."""
        requests = [
            PlannedRequest(
                index=index,
                arrival_s=0.0,
                model=self._model,
                tenant="bench",
                prompt=words(NUM_WORDS, self._rng),
                max_tokens=NUM_TOKENS,
            )
            for index in range(self._num_requests)
        ]
        before, started_s = cpu_seconds(self._session_id), time.perf_counter()
        outcomes = asyncio.run(closed_loop(self._endpoints[case], requests, self._num_streams))
        took_s, after = time.perf_counter() - started_s, cpu_seconds(self._session_id)
        for outcome in outcomes:
            if outcome.error is not None or outcome.completion_tokens != NUM_TOKENS:
                raise RuntimeError(f"{case}: {outcome.error or f'{outcome.completion_tokens} tokens'}")
        for role in ROLES:
            self.cpu_us[case][role].append((after[role] - before[role]) / self._num_requests * 1e6)
        return self._num_requests / took_s


async def metering_us(num_requests: int = 5000, num_rounds: int = 9) -> dict[str, float]:
    """Microseconds that metering adds to a request of a project with limits, by kind: the median of rounds."""

    async def read_body(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
        await receive()

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(2000), "more_body": False}

    async def send(message: Message) -> None: ...

    async def lease(holder: str, requests: Sequence[LeaseRequest]) -> list[LeaseGrant]:  # noqa: ARG001
        return [LeaseGrant(max(request.need, UNREACHED), UNREACHED) for request in requests]

    owner: Any = SimpleNamespace(lease=lease, record=None)
    pricing = PricingContext(Prices({}, "base"), "base")
    accounting = RequestAccounting(TenantMirror(), owner, pricing, "bench", time.time)
    rates = {"base": RateLimit(UNREACHED, UNREACHED, UNREACHED)}
    limits = TenantLimits(rates, max_concurrent=UNREACHED, calls_per_min=UNREACHED)
    caller = Principal("bench", "bench", Tenant("bench", "bench", 0.0, limits=limits), "key", "project")
    service: Any = SimpleNamespace(accounting=accounting)
    metered = MeteringMiddleware(read_body, service, HttpPolicy(), AddressLimiter(UNREACHED, time.monotonic))

    async def cpu_us(app: ASGIApp, method: str, path: str) -> float:
        started_s = time.process_time()
        for _ in range(num_requests):
            scope = {"type": "http", "method": method, "path": path, "headers": [], "state": {STATE: caller}}
            await app(scope, receive, send)
        return (time.process_time() - started_s) / num_requests * 1e6

    found: dict[str, float] = {}
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
        added = [await cpu_us(metered, method, path) - await cpu_us(read_body, method, path) for _ in range(num_rounds)]
        found[f"{method} {path}"] = float(np.median(added))
    await accounting.limiter.close()
    return found


def table(bench: Bench, values: dict[str, list[float]]) -> str:
    """What was measured, in Markdown."""
    lines = [
        f"| requests | requests/s | / {WITHOUT} | {' | '.join(f'CPU of the {role}, us' for role in ROLES)} |",
        f"|---|---:|---|{'---:|' * len(ROLES)}",
    ]
    for case, rates in values.items():
        cells = [f"{spread(rates).median:.1f}", str(ratios(rates, values[WITHOUT]))]
        cells += [f"{np.mean(bench.cpu_us[case][role]):.0f}" for role in ROLES]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    more = sum(float(np.mean(bench.cpu_us[WITH][role])) - float(np.mean(bench.cpu_us[WITHOUT][role])) for role in ROLES)
    return "\n".join([*lines, "", f"A key and its limits cost {more:.0f} us of CPU per request."])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "serve.yaml")
    parser.add_argument("--keys", type=int, default=100_000, help="keys in the database")
    parser.add_argument("--metering", action="store_true", help="measure only metering, without a service")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400, help="in each round, of each case")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.metering:
        for request, added_us in asyncio.run(metering_us()).items():
            print(f"{request}: metering adds {added_us:.1f} us of CPU")
        return
    machine: Any = environment()
    model = read_settings(given.config).model.name
    with tempfile.TemporaryDirectory() as temporary:
        folder, admin_key, port = Path(temporary), new_key(is_admin=True).value, free_port()
        settings = settings_with(given.config, folder, lambda args: args.setdefault("http", {}).update(auth="open"))
        arguments = serve_arguments(str(settings), port)
        environ = {ADMIN_KEY: admin_key, "POLYLORA_STATE_DIR": str(folder / "state")}
        url = f"http://127.0.0.1:{port}/v1"
        with Service(arguments, environ) as service:
            service.wait_for("Ready after")
            key = limited_key(url, admin_key)
        (database,) = (folder / "state").glob("catalog-*.sqlite")
        add_keys(database, given.keys - 1)
        with Service(arguments, environ) as service:
            service.wait_for("Ready after")
            bench = Bench(url, service.process.pid, key, model, given.streams, given.requests)
            for case in (WITH, WITHOUT):
                bench.measure(case)
                bench.cpu_us[case] = {role: [] for role in ROLES}
            values = rounds({case: partial(bench.measure, case) for case in (WITH, WITHOUT)}, given.rounds)
    print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, commit {machine['commit']}; load average before "
        f"{machine['load_average']}, after {environment()['load_average']}. {given.keys} keys, {given.streams} "
        f"streams, {NUM_WORDS} words, {NUM_TOKENS} tokens; {given.requests} requests a "
        f"round of each, {given.rounds} rounds.\n\n{table(bench, values)}"
    )


if __name__ == "__main__":
    main()
