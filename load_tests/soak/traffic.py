"""Requests at random times, as many a second as is asked, each compared with the answer that its adapter must give.

Most are streamed to their end. Some are left after their first event, some ask for three answers, some are sampled with
a seed and must repeat what the same seed gave before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from load_tests.chaos.traffic import ANSWER_TIMEOUT_S, Cut, ask

PROMPT, NUM_TOKENS = "the quick brown fox", 12
#: Shares of the kinds; the rest are streamed to their end.
KINDS = {"abandoned": 0.05, "three answers": 0.05, "sampled": 0.05}
NUM_SEEDS = 4
#: Popularity of the adapter number i: proportional to 1 / (i + 1).
ZIPF = 1.0


def compare(found: object, expected: object) -> None:
    """Raises RuntimeError if they differ."""
    if found != expected:
        raise RuntimeError(f"wrong tokens: {found!r} instead of {expected!r}")


class Traffic:
    """`expected`: greedy answers by model, the most popular first. Each request takes one of `keys` by chance."""

    def __init__(self, url: str, expected: Mapping[str, str], keys: Sequence[str], seed: int) -> None:
        self._url, self._expected, self._keys = url, expected, keys
        self._random = random.Random(seed)
        self._models = list(expected)
        weights = np.arange(1, len(self._models) + 1, dtype=np.float64) ** -ZIPF
        self._cumulated = np.cumsum(weights / weights.sum())
        self._sampled: dict[tuple[str, int], str] = {}
        self._is_over = False
        self.ended: Counter[str] = Counter()
        self.wrongs: list[str] = []
        #: (when it was due, seconds to its end) of each request that was streamed to its end.
        self.times_s: list[tuple[float, float]] = []

    def stop(self) -> None:
        self._is_over = True

    async def warm_up(self, num_streams: int) -> None:
        """Ask every adapter once, so that caches hold what they will."""
        models = iter(self._models)

        async def stream(http: httpx.AsyncClient) -> None:
            for model in models:
                await self._one(http, time.monotonic(), model)

        async with self._http() as http, asyncio.TaskGroup() as group:
            for _ in range(num_streams):
                group.create_task(stream(http))

    async def capacity(self, num_streams: int, seconds: float) -> float:
        """Requests a second that so many streams get answered."""
        until_s, before = time.monotonic() + seconds, self.ended.total()

        async def stream(http: httpx.AsyncClient) -> None:
            while time.monotonic() < until_s:
                await self._one(http, time.monotonic())

        async with self._http() as http, asyncio.TaskGroup() as group:
            for _ in range(num_streams):
                group.create_task(stream(http))
        self.times_s.clear()
        return (self.ended.total() - before) / seconds

    async def run(self, rate: float) -> None:
        """Send `rate` requests a second (Poisson) until `stop`, whether or not the former ones are answered."""
        due_s = time.monotonic()
        async with self._http() as http, asyncio.TaskGroup() as group:
            while not self._is_over:
                due_s += self._random.expovariate(rate)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                group.create_task(self._one(http, due_s))

    async def _one(self, http: httpx.AsyncClient, due_s: float, model: str = "") -> None:
        model = model or self._models[int(np.searchsorted(self._cumulated, self._random.random()))]
        drawn, kind = self._random.random(), "streamed"
        for name, share in KINDS.items():
            if drawn < share:
                kind = name
                break
            drawn -= share
        body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self._random.choice(self._keys)}"}
        try:
            await self._send(http, kind, body, headers)
        except (RuntimeError, Cut, httpx.HTTPError) as error:
            self.ended["wrong"] += 1
            self.wrongs.append(f"{time.strftime('%H:%M:%S')} {kind} {model}: {type(error).__name__}: {error}")
        else:
            self.ended[kind] += 1
            if kind == "streamed":
                self.times_s.append((due_s, time.monotonic() - due_s))

    async def _send(self, http: httpx.AsyncClient, kind: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        model = body["model"]
        if kind == "abandoned":
            async with http.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=headers) as answer:
                await anext(answer.aiter_lines())
            return
        if kind == "streamed":
            compare(await ask(http, body, headers), self._expected[model])
            return
        seed = self._random.randrange(NUM_SEEDS)
        changes: dict[str, Any] = {"n": 3} if kind == "three answers" else {"temperature": 0.9, "seed": seed}
        answer = await http.post("/v1/completions", json=body | changes, headers=headers)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text[:300]}")
        texts = [choice["text"] for choice in answer.json()["choices"]]
        if kind == "three answers":
            compare(texts, [self._expected[model]] * 3)
        else:
            compare(texts[0], self._sampled.setdefault((model, seed), texts[0]))

    def _http(self) -> httpx.AsyncClient:
        """Few idle connections: the pool looks at every one for each request, which makes the client itself slow."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        return httpx.AsyncClient(base_url=self._url, timeout=ANSWER_TIMEOUT_S, limits=limits)
