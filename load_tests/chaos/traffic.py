"""Endless requests, each compared with the answer that the same request has alone.

Counts how requests end, with a sentence for each wrong end. Only shortly after an ingress or HAProxy was killed may a
connection close, or the balancer answer for it; the text until then must be the beginning of the right answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

#: Clients may notice a killed ingress or HAProxy this long: Ray checks HAProxy's supervisor every second, and three
#: checks must fail before it starts another, which busy cores delay. The report gives the actual times.
PROXY_OUTAGE_S = 30.0
#: HAProxy's own answer while it knows no ingress (`app.cli.haproxy`).
BALANCER_SAYS = "the service is starting or stopping"
#: The reason of a `Cut` whose connection was refused.
REFUSED = httpx.ConnectError.__name__
#: A request that takes longer hangs.
ANSWER_TIMEOUT_S = 180.0


class ProxyOutages:
    """Times at which an ingress, HAProxy or a node was killed, and how long new requests failed after each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._kills: list[tuple[float, str]] = []
        #: By what was killed: how long after a death requests that began after it were cut off, the longest.
        self.longest_s: dict[str, float] = {}
        #: By what was killed: connections that were refused.
        self.num_refused: Counter[str] = Counter()

    def record_kill(self, part: str) -> None:
        self._kills.append((self.clock(), part))
        self.longest_s.setdefault(part, 0.0)

    def excuse(self, began_s: float, *, is_refused: bool) -> bool:
        """Whether a death explains that a request of `began_s` was cut off now, or its connection refused."""
        now_s = self.clock()
        deaths = [kill for kill in self._kills if began_s - PROXY_OUTAGE_S <= kill[0] <= now_s]
        if not deaths:
            return False
        killed_s, part = deaths[-1]
        if began_s >= killed_s:
            self.longest_s[part] = max(self.longest_s[part], now_s - killed_s)
        self.num_refused[part] += is_refused
        return True


class Cut(Exception):
    """The connection closed, or the balancer answered, after `text`."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(reason)
        self.text = text


async def ask(http: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> str:
    """The text of an answer, read as it comes. Raises Cut, and RuntimeError with what the service says."""
    text, is_over = "", False
    try:
        url, streamed = "/v1/completions", {**body, "stream": True}
        async with http.stream("POST", url, json=streamed, headers=dict(headers or {})) as answer:
            if answer.status_code != 200:
                said = (await answer.aread()).decode(errors="replace")
                if answer.status_code >= 500 and (not said.startswith("{") or BALANCER_SAYS in said):
                    raise Cut(f"the balancer says {answer.status_code}", text)
                raise RuntimeError(f"{answer.status_code}: {said[:300]}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    is_over = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(f"in the stream: {event['error']}")
                    text += "".join(choice["text"] for choice in event["choices"])
    except httpx.TimeoutException as error:
        raise RuntimeError(f"no end within {ANSWER_TIMEOUT_S:g} s ({type(error).__name__})") from error
    except httpx.TransportError as error:
        raise Cut(type(error).__name__, text) from error
    if not is_over:
        raise Cut("the stream ended without [DONE]", text)
    return text


class Traffic:
    """Streams of requests until `stop`."""

    def __init__(self, url: str, bodies: Sequence[Mapping[str, Any]], outages: ProxyOutages, seed: int) -> None:
        self._url = url
        self._bodies = bodies
        self._outages = outages
        self._random = random.Random(seed)
        self._alone: list[str] = []
        self._over = asyncio.Event()
        self.ended: Counter[str] = Counter()
        self.wrongs: list[str] = []
        self.slowest_s = 0.0

    async def learn(self) -> None:
        """Send each request alone to learn the right answers."""
        async with self._http() as http:
            self._alone = [await ask(http, body) for body in self._bodies]

    async def compare(self) -> None:
        """Send each request alone once more and compare."""
        async with self._http() as http:
            for index in range(len(self._bodies)):
                await self._one(http, index)

    async def run(self, num_streams: int) -> None:
        async with self._http() as http, asyncio.TaskGroup() as group:
            for _ in range(num_streams):
                group.create_task(self._stream(http))

    def stop(self) -> None:
        self._over.set()

    async def _stream(self, http: httpx.AsyncClient) -> None:
        while not self._over.is_set():
            await self._one(http, self._random.randrange(len(self._bodies)))

    async def _one(self, http: httpx.AsyncClient, index: int) -> None:
        body, alone, began_s = self._bodies[index], self._alone[index], self._outages.clock()
        try:
            text = await ask(http, body)
        except Cut as cut:
            if not alone.startswith(cut.text):
                self._wrong("wrong tokens", body, f"{cut.text!r} does not begin {alone!r}")
            elif self._outages.excuse(began_s, is_refused=str(cut) == REFUSED):
                self.ended["cut off by the death of an ingress or HAProxy"] += 1
                await asyncio.sleep(0.2)  # the balancer comes back
            else:
                self._wrong("cut off", body, f"{cut}, though neither an ingress nor HAProxy was killed")
        except RuntimeError as error:
            self._wrong("refused", body, str(error))
            await asyncio.sleep(0.5)
        else:
            if text == alone:
                self.ended["answered"] += 1
            else:
                self._wrong("wrong tokens", body, f"{text!r} instead of {alone!r}")
        self.slowest_s = max(self.slowest_s, self._outages.clock() - began_s)

    def _wrong(self, kind: str, body: Mapping[str, Any], what: str) -> None:
        self.ended[kind] += 1
        self.wrongs.append(f"{time.strftime('%H:%M:%S')} {body['model']} (seed {body['seed']}): {kind}: {what}")

    def _http(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self._url, timeout=ANSWER_TIMEOUT_S, limits=limits)
