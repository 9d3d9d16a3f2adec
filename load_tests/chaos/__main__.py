"""Chaos test: a service under traffic whose processes are killed and stopped.

    python -m load_tests.chaos --minutes 10

A tiny model runs on two Ray nodes of this machine, an engine replica and an ingress on each, behind HAProxy (`polylora
serve`), with PostgreSQL if its programs are installed (the report says so). Every few seconds one fault of
`chaos.events` is injected. Prints a report in JSON; the status is 1 if any answer was wrong or lost, if an acknowledged
change of the registry is missing, or if something leaks. Needs the packages of the extra `test`: it makes its model
with transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from load_tests.chaos.events import VICTIMS, Events, Faults
from load_tests.chaos.hub import Hub
from load_tests.chaos.node import SecondNode
from load_tests.chaos.registrations import Registrations
from load_tests.chaos.traffic import ProxyOutages, Traffic, ask
from load_tests.chaos.usage import leaks, usage
from load_tests.process_tree import processes
from load_tests.service import Service, free_port, serve_arguments
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.postgres import PostgresServer, find_postgres

RANKS = {"a0": 8, "a1": 16, "a2": 1, "a3": 8, "a4": 32, "a5": 8}
#: Adapters on the hub.
HUB_RANKS = {"h0": 8, "h1": 4}
#: Traffic runs this long before the first count of resources.
WARM_UP_S = 15.0
#: After the last fault everything must be healthy within this time: a node rejoins, and Serve restarts what ran there.
SETTLE_S = 120.0


def settings(folder: Path, hub_url: str) -> dict[str, Any]:
    """A Serve application file for the tiny model."""
    engine = {"num_kv_blocks": 1024, "lora_pool_rows": 256, "cpu": {"num_threads": 1}}
    args = {
        "model": {"uri": str(folder / "model"), "name": "tiny"},
        "engine": engine,
        "adapters": {
            "roots": [str(folder / "loras")],
            "urls": [hub_url],
            "preload": [
                *({"name": name, "path": name} for name in RANKS),
                *({"name": name, "path": f"{hub_url}{name}/"} for name in HUB_RANKS),
            ],
        },
    }
    deployments = [
        {"name": "Ingress", "num_replicas": 2, "max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 0.1}},
        {
            "name": "EngineReplica",
            "num_replicas": 2,
            "max_replicas_per_node": 1,
            "ray_actor_options": {"num_cpus": 0.5},
        },
    ]
    application = {"name": "polylora", "route_prefix": "/", "import_path": "app.main:build"}
    return {
        "proxy_location": "HeadOnly",
        "applications": [{**application, "args": args, "deployments": deployments}],
    }


def bodies(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests of the base and of every adapter, short and long ones."""
    return [
        {
            "model": ("tiny", *RANKS)[index % (1 + len(RANKS))],
            "prompt": " ".join(rng.choices(("the", "quick", "brown", "fox", "dog"), k=rng.randint(1, 60))),
            "max_tokens": rng.choice((8, 40, 150, 400)),
            "temperature": 0.9,
            "seed": index,
            "ignore_eos": True,
        }
        for index in range(count)
    ]


async def run(world: World, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the test on a started service; returns the report."""
    import httpx

    outages, rng = ProxyOutages(), random.Random(options.seed)
    traffic = Traffic(url, bodies(random.Random(options.seed), options.requests), outages, options.seed)
    sources = {**{name: name for name in RANKS}, **{name: f"{world.hub.url}{name}/" for name in HUB_RANKS}}
    registrations = Registrations(url, list(sources.values()), options.seed)
    faults = Faults(world.service.process.pid, world.node, world.database, world.hub, outages, rng)
    events = Events(faults.faults, options.every, rng, outages.clock)
    probe = {"prompt": "the quick", "max_tokens": 24, "temperature": 0.0, "seed": 1, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        expected = {source: await ask(http, {**probe, "model": name}) for name, source in sources.items()}
    await traffic.learn()
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.run(options.streams))
        group.create_task(registrations.run())
        await asyncio.sleep(WARM_UP_S)
        before, until_s = usage(*faults.session_ids()), outages.clock() + 60 * options.minutes
        await events.run(until_s)
        await asyncio.sleep(max(0.0, until_s - outages.clock()))
        await wait_until_settled(url, faults)
        after = usage(*faults.session_ids())
        traffic.stop()
        registrations.stop()
    await registrations.check(probe, expected)
    await traffic.compare()
    return {
        "minutes": options.minutes,
        "database": "PostgreSQL" if world.database else "SQLite: PostgreSQL's programs are not installed",
        "events": events.happened,
        "requests": dict(traffic.ended),
        "slowest_s": round(traffic.slowest_s, 1),
        "longest_outage_s": round(outages.longest_s, 1),
        "registrations": dict(registrations.ended),
        "before": before.to_json(),
        "after": after.to_json(),
        "more open files": dict((after.kinds - before.kinds).most_common(8)),
        "wrong": [*traffic.wrongs, *registrations.wrongs, *leaks(before, after), *staged_files(world.service.folder)],
    }


async def wait_until_settled(url: str, faults: Faults) -> None:
    """Wait until all roles have processes and the service is healthy. Raises TimeoutError."""
    import httpx

    expected = dict.fromkeys(VICTIMS, 1) | {"engine": 2, "ingress": 2}
    async with asyncio.timeout(SETTLE_S), httpx.AsyncClient(base_url=url, timeout=10) as http:
        while True:
            found: Mapping[str, Sequence[int]] = processes(*faults.session_ids())
            with suppress(httpx.TransportError):
                is_whole = all(len(found.get(role, ())) >= count for role, count in expected.items())
                if is_whole and (await http.get("/v1/loras/a0")).status_code == 200:
                    return
            await asyncio.sleep(0.5)


def staged_files(folder: Path) -> list[str]:
    """Temporary files of downloads that remain under a service's folder."""
    left = [path for staging in folder.rglob("staging") for path in staging.rglob("*") if path.is_file()]
    left = [path for path in left if path.name != "guard" and path.suffix != ".lock"]
    return [f"{len(left)} files of downloads are left: {left[0]}"] if left else []


class World(NamedTuple):
    """A running service and its surroundings. `database` is None if PostgreSQL is not installed."""

    service: Service
    node: SecondNode
    database: PostgresServer | None
    hub: Hub


@contextmanager
def world(folder: Path, port: int) -> Iterator[World]:
    """Start everything; the service is ready."""
    save_tiny_model(folder / "model")
    for seed, (adapter, rank) in enumerate((RANKS | HUB_RANKS).items()):
        save_adapter(folder / ("loras" if adapter in RANKS else "hub") / adapter, rank=rank, seed=seed)
    programs = find_postgres()
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(folder / "hub"))
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(settings(folder, hub.url)))
        database = None if programs is None else PostgresServer(programs)
        environment = {
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",  # as Ray sets it for the service's own node; the other one has to set it
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # Ray's ports also for other nodes
        }
        if database is not None:
            stack.callback(database.stop)
            environment["POLYLORA_REGISTRY_URL"] = database.new_database()
        service = stack.enter_context(Service(serve_arguments(str(path), port), environment))
        node = SecondNode(service)
        stack.callback(node.end)
        try:
            node.start()
            service.wait_for("Ready after", timeout_s=600)
            yield World(service, node, database, hub)
        except BaseException:
            print("\n".join(line.text for line in service.lines[-40:]), file=sys.stderr)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two events")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=56, help="different requests")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="plx") as name, world(Path(name), port) as started:
        report = asyncio.run(run(started, f"http://127.0.0.1:{port}", options))
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
