"""Chaos test: a service under traffic whose processes are killed and stopped.

    python -m load_tests.chaos --minutes 10

A tiny model runs on Ray nodes of this machine (`--nodes`), an engine replica and an ingress on each, or two of both on
a single one, behind HAProxy (`polylora serve`), with PostgreSQL if its programs are installed (the report says so).
The service's state has a disk of its own, which one of the faults fills; that needs root, and is left out otherwise.
Every few seconds one fault of `chaos.events` is injected. Prints a report in JSON; the status is 1 if any answer was
wrong or lost, if an acknowledged change of the registry is missing, or if something leaks. Needs the packages of the
extra `test`: it makes its model with transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from load_tests.chaos.events import Events, Faults
from load_tests.chaos.hub import Hub
from load_tests.chaos.node import WorkerNode
from load_tests.chaos.recovery import Recoveries
from load_tests.chaos.registrations import Registrations
from load_tests.chaos.traffic import ProxyOutages, Traffic, ask
from load_tests.chaos.usage import leaks, usage
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
#: The disk with the service's state, which a fault fills.
DISK_BYTES = 128 << 20


def settings(folder: Path, hub_url: str, num_nodes: int) -> dict[str, Any]:
    """A Serve application file for the tiny model."""
    replicas = {"num_replicas": num_replicas(num_nodes)} | ({"max_replicas_per_node": 1} if num_nodes > 1 else {})
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
        {"name": "Ingress", "ray_actor_options": {"num_cpus": 0.1}, **replicas},
        {"name": "EngineReplica", "ray_actor_options": {"num_cpus": 0.5}, **replicas},
    ]
    application = {"name": "polylora", "route_prefix": "/", "import_path": "app.main:build"}
    return {
        "proxy_location": "HeadOnly",
        "applications": [{**application, "args": args, "deployments": deployments}],
    }


def num_replicas(num_nodes: int) -> int:
    """Engine replicas, and ingresses: when one is killed another one must be there."""
    return max(2, num_nodes)


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
    recoveries = Recoveries(
        url,
        Path(world.service.environment["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent,
        world.session_ids,
        num_replicas(options.nodes),
        next(iter(RANKS)),
        outages.clock,
    )
    faults = Faults(world.session_ids, world.nodes, world.database, world.hub, world.disk, outages, recoveries, rng)
    events = Events(faults.faults, options.every, rng, outages.clock)
    probe = {"prompt": "the quick", "max_tokens": 24, "temperature": 0.0, "seed": 1, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        expected = {source: await ask(http, {**probe, "model": name}) for name, source in sources.items()}
    await traffic.learn()
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.run(options.streams))
        group.create_task(registrations.run())
        measuring = group.create_task(recoveries.run())
        await asyncio.sleep(WARM_UP_S)
        before, until_s = usage(*world.session_ids()), outages.clock() + 60 * options.minutes
        await events.run(until_s)
        await asyncio.sleep(max(0.0, until_s - outages.clock()))
        missing = await recoveries.settle(SETTLE_S)
        measuring.cancel()
        after = usage(*world.session_ids())
        traffic.stop()
        registrations.stop()
    await registrations.check(probe, expected)
    await traffic.compare()
    return {
        "minutes": options.minutes,
        "database": "PostgreSQL" if world.database else "SQLite: PostgreSQL's programs are not installed",
        "nodes": options.nodes,
        "events": events.happened,
        "num_events": dict(events.num_by_kind),
        "requests": dict(traffic.ended),
        "slowest_s": round(traffic.slowest_s, 1),
        "num_wrong_tokens": traffic.ended["wrong tokens"],
        "num_lost_acknowledgements": len(registrations.lost),
        "num_refused_connections": {part: outages.num_refused[part] for part in outages.longest_s},
        "longest_outage_s": {part: round(outage_s, 2) for part, outage_s in outages.longest_s.items()},
        "slowest_recovery_s": {part: round(took_s, 1) for part, took_s in recoveries.slowest_s.items()},
        "registrations": dict(registrations.ended),
        "before": before.to_json(),
        "after": after.to_json(),
        "more open files": dict((after.kinds - before.kinds).most_common(8)),
        "wrong": [
            *traffic.wrongs,
            *registrations.wrongs,
            *registrations.lost,
            *(f"{part} does not work after {SETTLE_S:g} s" for part in sorted(missing)),
            *leaks(before, after),
            *staged_files(Path(world.service.environment["POLYLORA_STATE_DIR"])),
        ],
    }


def staged_files(folder: Path) -> list[str]:
    """Temporary files of downloads that remain under a service's folder."""
    left = [path for staging in folder.rglob("staging") for path in staging.rglob("*") if path.is_file()]
    left = [path for path in left if path.name != "guard" and path.suffix != ".lock"]
    return [f"{len(left)} files of downloads are left: {left[0]}"] if left else []


class World(NamedTuple):
    """A running service and its surroundings. `nodes`: those beside its own. `database`: None if not installed.
    `disk`: None without the right to mount one.
    """

    service: Service
    nodes: list[WorkerNode]
    database: PostgresServer | None
    hub: Hub
    disk: Path | None

    def session_ids(self) -> list[int]:
        """Session ids of everything that serves."""
        return [self.service.process.pid, *(node.session_id for node in self.nodes)]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A new folder, which is a file system of `DISK_BYTES`; None if this process may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "polylora-chaos", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def world(folder: Path, port: int, num_nodes: int) -> Iterator[World]:
    """Start everything; the service is ready."""
    save_tiny_model(folder / "model")
    for seed, (adapter, rank) in enumerate((RANKS | HUB_RANKS).items()):
        save_adapter(folder / ("loras" if adapter in RANKS else "hub") / adapter, rank=rank, seed=seed)
    programs = find_postgres()
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(folder / "hub"))
        disk = stack.enter_context(small_disk(folder / "state"))
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(settings(folder, hub.url, num_nodes)))
        database = None if programs is None else PostgresServer(programs)
        environment = {
            "OMP_NUM_THREADS": "1",
            "POLYLORA_STATE_DIR": str(folder / "state"),
            "RAY_AUTH_MODE": "token",  # as Ray sets it for the service's own node; the other one has to set it
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # Ray's ports also for other nodes
        }
        if database is not None:
            stack.callback(database.stop)
            environment["POLYLORA_REGISTRY_URL"] = database.new_database()
        service = stack.enter_context(Service(serve_arguments(str(path), port), environment))
        nodes = [WorkerNode(service, number) for number in range(1, num_nodes)]
        try:
            service.wait_for("starting the service")
            service.process.send_signal(signal.SIGSTOP)  # it gives up if there is no room for 20 s
            for node in nodes:
                stack.callback(node.end)
                node.start()
                node.wait_until_joined()  # two that start at once choose the same sockets
            service.process.send_signal(signal.SIGCONT)
            service.wait_for("Ready after", timeout_s=600)
            yield World(service, nodes, database, hub, disk)
        except BaseException:
            print("\n".join(line.text for line in service.lines[-40:]), file=sys.stderr)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two events")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=56, help="different requests")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="plx") as name, world(Path(name), port, options.nodes) as started:
        report = asyncio.run(run(started, f"http://127.0.0.1:{port}", options))
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
