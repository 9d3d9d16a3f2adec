"""Names that are loaded, replaced and unloaded all the time, checked at the end against the acknowledged changes.

For every name the set of possible meanings follows from the service's acknowledgements. A request whose answer was lost
leaves both meanings possible; such a name is not changed any more, because the request may still take effect. At the
end every name must mean one of them and answer like that source.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from load_tests.chaos.traffic import ANSWER_TIMEOUT_S, Cut, ask

#: How many names change at a time.
NUM_NAMES = 6
#: Between two changes of a name.
PAUSE_S = 0.5


class Registrations:
    """Changes names, which begin with `prefix` and are new, and checks them. `sources` are folders under the service's
    root; None: the name is unknown.
    """

    def __init__(self, url: str, sources: Sequence[str], seed: int, prefix: str = "n") -> None:
        self._url = url
        self._prefix = prefix
        self._sources = sources
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._over = asyncio.Event()
        self._may_mean: dict[str, set[str | None]] = {}
        self.ended: Counter[str] = Counter()
        self.wrongs: list[str] = []
        self.lost: list[str] = []  # acknowledged changes that are missing

    async def run(self) -> None:
        http = httpx.AsyncClient(base_url=self._url, timeout=ANSWER_TIMEOUT_S)
        async with http, asyncio.TaskGroup() as group:
            for _ in range(NUM_NAMES):
                group.create_task(self._change_names(http))

    def stop(self) -> None:
        self._over.set()

    async def check(self, probe: Mapping[str, Any], expected: Mapping[str, str]) -> None:
        """Compare every name's meaning with the possible ones. `expected`: source -> the answer to `probe`."""
        async with httpx.AsyncClient(base_url=self._url, timeout=ANSWER_TIMEOUT_S) as http:
            for name, may_mean in self._may_mean.items():
                answer = await http.get(f"/v1/loras/{name}")
                is_known = answer.status_code == 200 and answer.json()["state"] == "LOADED"
                if not is_known:
                    if None not in may_mean:
                        self.lost.append(f"{name} is lost: {answer.text[:200]}; it may mean {may_mean}")
                    continue
                try:
                    text = await ask(http, {**probe, "model": name})
                except (Cut, RuntimeError) as error:
                    self.lost.append(f"{name} is known and not served: {error}")
                    continue
                if text not in {expected[source] for source in may_mean if source is not None}:
                    means = [source for source, answer_of in expected.items() if answer_of == text]
                    self.lost.append(f"{name} means {means}; it may mean {may_mean}")

    async def _change_names(self, http: httpx.AsyncClient) -> None:
        name = None
        while not self._over.is_set():
            if name is None:
                name = f"{self._prefix}{next(self._numbers)}"
                self._may_mean[name] = {None}
            if not await self._change(http, name):
                name = None  # its meaning is unknown: start another name
            await asyncio.sleep(PAUSE_S)

    async def _change(self, http: httpx.AsyncClient, name: str) -> bool:
        """Send one change; returns whether the name's meaning is known now."""
        unloads = None not in self._may_mean[name] and self._random.random() < 0.3
        meaning = None if unloads else self._random.choice(self._sources)
        before = self._may_mean[name]
        self._may_mean[name] = before | {meaning}
        try:
            if unloads:
                answer = await http.delete(f"/v1/loras/{name}")
            else:
                answer = await http.post("/v1/loras?wait=true", json={"name": name, "path": meaning})
        except httpx.TransportError as error:
            self.ended[f"lost ({type(error).__name__})"] += 1
            return False
        self.ended[f"{answer.request.method} {answer.status_code}"] += 1
        if answer.status_code in (200, 201):
            self._may_mean[name] = {meaning}
            return True
        if answer.status_code <= 500:  # 502 and 503 say that a part is away
            self.wrongs.append(f"{answer.request.method} {name}: {answer.status_code} {answer.text[:200]}")
        return False
