"""`python -m load_tests.chaos --minutes 10`: a service under traffic whose processes are killed and stopped.

In: how long, and a seed. Out: a report in JSON, and status 1 if any answer was wrong or lost, if a change of the
registry that was acknowledged is not there, or if something grows. A tiny model with two engine replicas and two
ingresses behind HAProxy (`polylora serve`); every so many seconds one process is killed (SIGKILL), or stopped for ten
seconds. Needs the packages of the extra `test`: it makes its model with transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from load_tests.chaos.registrations import Registrations
from load_tests.chaos.traffic import Doors, Traffic, ask
from load_tests.process_tree import processes
from load_tests.service import Service, free_port, serve_arguments
from tests.e2e.tiny import save_adapter, save_tiny_model

RANKS = {"a0": 8, "a1": 16, "a2": 1, "a3": 8, "a4": 32, "a5": 8}
#: Whose death a client sees.
DOORS = ("ingress", "haproxy")
VICTIMS = ("engine", "ingress", "store", "placement", "haproxy")
STOPPED_S = 10.0
#: After the last event everything is whole again within this.
SETTLE_S = 60.0


class Usage(NamedTuple):
    """What the processes of a service hold, added up."""

    num_processes: int
    num_files: int
    resident_mb: int


def usage(session_id: int) -> Usage:
    pids = [pid for found in processes(session_id).values() for pid in found]
    num_files = resident = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            num_files += len(os.listdir(f"/proc/{pid}/fd"))
            resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(len(pids), num_files, resident >> 20)


def grown(before: Usage, after: Usage) -> list[str]:
    """What the service holds more of than it may: processes that died were replaced, one by one."""
    limits = Usage(before.num_processes + 8, round(1.5 * before.num_files) + 100, 2 * before.resident_mb)
    return [
        f"{name} grew from {getattr(before, name)} to {getattr(after, name)}"
        for name in Usage._fields
        if getattr(after, name) > getattr(limits, name)
    ]


class Events:
    """One process after the other dies or stands still."""

    def __init__(self, session_id: int, doors: Doors, every_s: float, seed: int) -> None:
        self._session_id = session_id
        self._doors = doors
        self._every_s = every_s
        self._random = random.Random(seed)
        self.happened: list[str] = []

    async def run(self, until_s: float) -> None:
        """Each role is killed and stopped once before any is a second time."""
        plan: list[tuple[str, str]] = []
        while self._doors.clock() + self._every_s < until_s:
            await asyncio.sleep(self._every_s)
            if not plan:
                plan = [(role, deed) for role in VICTIMS for deed in ("kill", "stop")]
                self._random.shuffle(plan)
            await self._happen(*plan.pop())

    async def _happen(self, role: str, deed: str) -> None:
        pids = processes(self._session_id).get(role, [])
        if not pids:
            self.happened.append(f"{time.strftime('%H:%M:%S')} no {role} was there to {deed}")
            return
        pid = self._random.choice(pids)
        self.happened.append(f"{time.strftime('%H:%M:%S')} {deed} {role} {pid}")
        print(self.happened[-1], file=sys.stderr, flush=True)
        with suppress(ProcessLookupError):
            if deed == "kill":
                if role in DOORS:
                    self._doors.killed()
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)


def settings(folder: Path) -> dict[str, Any]:
    """A Serve application file for the tiny model."""
    engine = {"num_kv_blocks": 1024, "adapter_rank_rows": 256, "cpu": {"num_threads": 1}}
    args = {
        "model": {"uri": str(folder / "model"), "name": "tiny"},
        "engine": engine,
        "adapters": {
            "roots": [str(folder / "loras")],
            "preload": [{"name": name, "path": name} for name in RANKS],
        },
    }
    deployments = [
        {"name": "Ingress", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}},
        {"name": "EngineReplica", "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}},
    ]
    application = {"name": "polylora", "route_prefix": "/", "import_path": "app.main:build"}
    return {"applications": [{**application, "args": args, "deployments": deployments}]}


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


async def run(service: Service, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Everything after the start; the report."""
    import httpx

    doors = Doors()
    traffic = Traffic(url, bodies(random.Random(options.seed), options.requests), doors, options.seed)
    registrations = Registrations(url, list(RANKS), options.seed)
    events = Events(service.process.pid, doors, options.every, options.seed)
    probe = {"prompt": "the quick", "max_tokens": 24, "temperature": 0.0, "seed": 1, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        expected = {name: await ask(http, {**probe, "model": name}) for name in RANKS}
    await traffic.learn()
    before = usage(service.process.pid)
    until_s = doors.clock() + 60 * options.minutes
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.run(options.streams))
        group.create_task(registrations.run())
        await events.run(until_s)
        await asyncio.sleep(max(0.0, until_s - doors.clock()))
        traffic.stop()
        registrations.stop()
    await settled(url, service.process.pid)
    after = usage(service.process.pid)
    await registrations.check(probe, expected)
    await traffic.compare()
    return {
        "minutes": options.minutes,
        "events": events.happened,
        "requests": dict(traffic.ended),
        "slowest_s": round(traffic.slowest_s, 1),
        "registrations": dict(registrations.ended),
        "before": before._asdict(),
        "after": after._asdict(),
        "wrong": [*traffic.wrongs, *registrations.wrongs, *grown(before, after)],
    }


async def settled(url: str, session_id: int) -> None:
    """Return when all roles are there and the service says that it is healthy. Raises TimeoutError."""
    import httpx

    async with asyncio.timeout(SETTLE_S), httpx.AsyncClient(base_url=url, timeout=10) as http:
        while True:
            found: Mapping[str, Sequence[int]] = processes(session_id)
            with suppress(httpx.TransportError):
                if all(found.get(role) for role in VICTIMS) and (await http.get("/v1/loras/a0")).status_code == 200:
                    return
            await asyncio.sleep(0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two events")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=56, help="different requests")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="plx") as name:
        folder = Path(name)
        save_tiny_model(folder / "model")
        for seed, (adapter, rank) in enumerate(RANKS.items()):
            save_adapter(folder / "loras" / adapter, rank=rank, seed=seed)
        path, port = folder / "serve.yaml", free_port()
        path.write_text(yaml.safe_dump(settings(folder)))
        with Service(serve_arguments(str(path), port), {"OMP_NUM_THREADS": "1"}) as service:
            service.wait_for("Ready after", timeout_s=600)
            try:
                report = asyncio.run(run(service, f"http://127.0.0.1:{port}", options))
            except BaseException:
                print("\n".join(line.text for line in service.lines[-40:]), file=sys.stderr)
                raise
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
