"""How long each part of a service takes to work again after it was killed.

Engines and ingresses work if as many as at the start take requests; HAProxy, placement and the store if they answer; a
node if everything does, because a part of everything died with it.
"""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from load_tests.process_tree import processes

#: Processes that are killed (`process_tree.ROLES`).
ROLES = ("engine", "ingress", "store", "placement", "haproxy")
#: The times are this exact, or as exact as the service is quick to answer.
POLL_S = 0.2
#: An answer that takes longer is none: its ingress may stand still.
TIMEOUT_S = 5.0


class Recoveries:
    """`haproxy`: the folder of its files. `num_replicas`: of engines and ingresses. `adapter`: one that is loaded."""

    def __init__(
        self,
        url: str,
        haproxy: Path,
        session_ids: Callable[[], Sequence[int]],
        num_replicas: int,
        adapter: str,
        clock: Callable[[], float],
    ) -> None:
        self._url = url
        self._haproxy = haproxy
        self._session_ids = session_ids
        self._num_replicas = num_replicas
        self._adapter = adapter
        self._clock = clock
        self._killed_s: dict[str, float] = {}
        self.slowest_s: dict[str, float] = {}

    def begin(self, part: str, killed_s: float) -> None:
        """A part was killed: one of `ROLES`, or `node`."""
        self._killed_s.setdefault(part, killed_s)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            before = dict(self._killed_s)
            if not before:
                continue
            for part in before.keys() & await self.working():
                took_s = self._clock() - self._killed_s.pop(part)
                self.slowest_s[part] = max(self.slowest_s.get(part, 0.0), took_s)

    async def settle(self, timeout_s: float) -> set[str]:
        """Wait until everything works and was measured; returns the parts that do not work after this time."""
        deadline_s = self._clock() + timeout_s
        while True:
            missing = {*ROLES, "node"} - await self.working()
            if not (missing or self._killed_s) or self._clock() >= deadline_s:
                return missing | self._killed_s.keys()
            await asyncio.sleep(POLL_S)

    async def working(self) -> set[str]:
        """All parts that work now."""
        found = processes(*self._session_ids())
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S) as http:
            paths = ("/livez", "/v1/overview", f"/v1/loras/{self._adapter}")
            proxy, overview, adapter = await asyncio.gather(*(_answer(http, path) for path in paths))
        num_running = sum(replica["state"] == "running" for replica in overview.get("replicas", ()))
        works = {
            "engine": min(num_running, len(found.get("engine", ()))) >= self._num_replicas,
            "ingress": await self._num_ingresses() >= self._num_replicas,
            "haproxy": bool(proxy),
            "placement": bool(found.get("placement")) and overview.get("scaling_decisions") is not None,
            "store": bool(adapter),
        }
        return {part for part in ROLES if works[part]} | ({"node"} if all(works.values()) else set())

    async def _num_ingresses(self) -> int:
        """Ingresses to which HAProxy sends requests."""
        socket = next(self._haproxy.glob("*/admin.sock"), self._haproxy)  # in the head node's folder
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(socket)
                writer.write(b"show stat\n")
                table = (await reader.read()).decode().removeprefix("# ").splitlines()
                writer.close()
        except OSError:  # HAProxy is down, or stands still
            return 0
        servers = [row for row in csv.DictReader(table) if row["type"] == "2" and row["act"] == "1"]  # no backups
        return sum(row["status"].startswith("UP") for row in servers)


async def _answer(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """The body; nothing if the answer is an error or there is none."""
    with suppress(httpx.TransportError):
        answer = await http.get(path)
        if answer.status_code == 200:
            body: dict[str, Any] = answer.json()
            return body
    return {}
