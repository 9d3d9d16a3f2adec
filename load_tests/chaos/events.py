"""Faults for a service: one process, machine or resource after the other dies, stops or is full.

One fault is injected every few seconds, each once before any is repeated. A stop lasts `STOPPED_S`, and a killed node
or database is started again: everything else must recover by itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from load_tests.chaos.hub import Hub
from load_tests.chaos.node import WorkerNode
from load_tests.chaos.recovery import ROLES, Recoveries
from load_tests.chaos.traffic import ProxyOutages
from load_tests.process_tree import processes
from tests.postgres import PostgresServer

#: Roles whose death clients notice.
CLIENT_FACING = ("ingress", "haproxy")
STOPPED_S = 10.0
#: A killed node or database is restarted after this time.
AWAY_S = 3.0
#: Left out without PostgreSQL's programs.
DATABASE_FAULTS = ("kill the database", "stop the database")

#: Injects a fault and returns what it hit.
Fault = Callable[[], Awaitable[str]]


class Faults:
    """All faults of a service by name: `faults`."""

    def __init__(
        self,
        session_ids: Callable[[], Sequence[int]],
        nodes: Sequence[WorkerNode],
        database: PostgresServer | None,
        hub: Hub,
        disk: Path | None,
        outages: ProxyOutages,
        recoveries: Recoveries,
        rng: random.Random,
    ) -> None:
        """`session_ids`: of everything that serves. `nodes`: those beside the service's own, which is not killed.
        `disk`: a file system that has the service's state and nothing else.
        """
        self._session_ids = session_ids
        self._nodes = nodes
        self._database = database
        self._hub = hub
        self._outages = outages
        self._recoveries = recoveries
        self._random = rng
        self.faults: dict[str, Fault] = {}
        for role in ROLES:
            self.faults[f"kill {role}"] = partial(self._kill, role)
            self.faults[f"stop {role}"] = partial(self._stop, role)
        if nodes:
            self.faults |= {"kill a raylet": self._kill_raylet, "stop a raylet": self._stop_raylet}
        self.faults["hang the hub"] = self._hang_hub
        if disk is not None:
            self.faults["fill the disk"] = partial(self._fill_disk, disk)
        if database is not None:
            self.faults |= {
                name: partial(self._database_away, database, fault)
                for name, fault in zip(DATABASE_FAULTS, (_restart, _stand_still), strict=True)
            }

    async def _kill(self, role: str) -> str:
        pid = self._one(role)
        if role in CLIENT_FACING:
            self._outages.record_kill(role)
        os.kill(pid, signal.SIGKILL)
        self._recoveries.begin(role, self._outages.clock())
        return str(pid)

    async def _stop(self, role: str) -> str:
        return await _still([self._one(role)])

    async def _kill_raylet(self) -> str:
        """Kill a raylet: everything on its node dies with it, perhaps an ingress; then the node is started again."""
        node, killed_s = self._random.choice(self._nodes), self._outages.clock()
        raylets = node.raylets
        self._outages.record_kill("node")
        for pid in raylets:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(AWAY_S)
        await asyncio.to_thread(node.end)
        await asyncio.to_thread(node.start)
        self._recoveries.begin("node", killed_s)  # before this, processes of the old node may be alive
        return str(raylets)

    async def _stop_raylet(self) -> str:
        return await _still(self._random.choice(self._nodes).raylets)

    async def _fill_disk(self, disk: Path) -> str:
        filler = disk / "filler"
        try:
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(1 << 20)):
                    pass
            await asyncio.sleep(STOPPED_S)
        finally:
            filler.unlink()
        return str(disk)

    async def _hang_hub(self) -> str:
        self._hub.answers.clear()
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            self._hub.answers.set()
        return self._hub.url

    async def _database_away(self, database: PostgresServer, fault: Callable[[PostgresServer], Awaitable[None]]) -> str:
        await fault(database)
        return "PostgreSQL"

    def _one(self, role: str) -> int:
        """One random process of a role. Raises ProcessLookupError."""
        pids = processes(*self._session_ids()).get(role, [])
        if not pids:
            raise ProcessLookupError(role)
        return self._random.choice(pids)


class Events:
    """Injects faults one after the other in random order."""

    def __init__(
        self, faults: Mapping[str, Fault], every_s: float, rng: random.Random, clock: Callable[[], float]
    ) -> None:
        self._faults = faults
        self._every_s = every_s
        self._random = rng
        self._clock = clock
        self.happened: list[str] = []
        self.num_by_kind: Counter[str] = Counter()

    async def run(self, until_s: float) -> None:
        """Inject each fault once before any is repeated."""
        plan: list[str] = []
        while self._clock() + self._every_s < until_s:
            await asyncio.sleep(self._every_s)
            if not plan:
                plan = list(self._faults)
                self._random.shuffle(plan)
            name, at = plan.pop(), time.strftime("%H:%M:%S")
            print(f"{at} {name}", file=sys.stderr, flush=True)
            with suppress(ProcessLookupError):  # it has just ended, and its successor has not started
                self.happened.append(f"{at} {name}: {await self._faults[name]()}")
                self.num_by_kind[name] += 1


async def _still(pids: Sequence[int]) -> str:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return str(pids)


async def _restart(database: PostgresServer) -> None:
    database.kill()
    await asyncio.sleep(AWAY_S)
    await asyncio.to_thread(database.start)


async def _stand_still(database: PostgresServer) -> None:
    database.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S)
    finally:
        database.send(signal.SIGCONT)
