"""Several nodes: what is loaded through one ingress all serve, and a node that dies or falls silent costs no token.

The tests use up the cluster: each takes from it what the next ones do without. Another one's head dies (`test_head`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from tests.e2e.cluster.conftest import Node, NodesOfOneMachine

MODELS = ("tiny", "r8", "r16")
#: How long a node that was silent may take until it answers again, seconds.
RETURN_TIMEOUT_S = 180.0


def body(model: str, seed: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": f"the quick {seed}",
        "max_tokens": max_tokens,
        "temperature": 0.9,
        "seed": seed,
        "ignore_eos": True,
    }


async def ask(url: str, request: dict[str, Any]) -> str:
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(f"{url}/v1/completions", json=request)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


async def register(url: str, name: str, path: str) -> None:
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(f"{url}/v1/loras?wait=true", json={"name": name, "path": path})
        assert answer.status_code == 201, answer.text


@asynccontextmanager
async def traffic(
    urls: list[str], expected: dict[str, str], closed: Collection[str] = ()
) -> AsyncIterator[list[float]]:
    """Requests at every ingress, one behind the other; each answer is checked. Yields how long answers took.

    Those at an ingress of `closed`, which may become more, may end with a closed connection: its node is dead.
    """
    took_s: list[float] = []
    over = asyncio.Event()

    async def one(url: str, model: str) -> None:
        while not over.is_set():
            began_s = time.monotonic()
            try:
                text = await ask(url, body(model, 1, 60))
            except httpx.TransportError as error:
                if url in closed and not isinstance(error, httpx.TimeoutException):
                    return
                raise
            assert text == expected[model]
            took_s.append(time.monotonic() - began_s)

    tasks = [asyncio.create_task(one(url, model)) for url in urls for model in expected]
    try:
        yield took_s
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def others(cluster: NodesOfOneMachine, *but: Node) -> list[str]:
    return [await cluster.ingress_url(node) for node in cluster.nodes if node not in but]


async def returned(cluster: NodesOfOneMachine, node: Node, request: dict[str, Any]) -> str:
    """The answer of a node that was silent: its ingress may be ended and replaced meanwhile."""
    async with asyncio.timeout(RETURN_TIMEOUT_S):
        while True:
            with suppress(httpx.TransportError):
                return await ask(await cluster.ingress_url(node), request)
            await asyncio.sleep(0.5)


async def test_an_adapter_loaded_through_one_ingress_is_served_by_all(cluster: NodesOfOneMachine) -> None:
    urls = await others(cluster)
    assert len(set(urls)) == len(cluster.nodes)
    for name, url in zip(MODELS[1:], urls, strict=False):
        await register(url, name, name)
    for model in MODELS:
        texts = await asyncio.gather(*(ask(url, body(model, 1, 30)) for url in urls))
        assert len(set(texts)) == 1
    assert len({await ask(urls[0], body(model, 1, 30)) for model in MODELS}) == len(MODELS)


async def test_an_adapters_bytes_come_to_a_node_once_and_are_shared_there(cluster: NodesOfOneMachine) -> None:
    """The second process of a node has them while nothing of the node that they came from moves."""
    store = cluster.node_of("store")
    place = next(place for place, node in enumerate(cluster.nodes) if place and node is not store)
    await asyncio.to_thread(cluster.do, f"ask {place} r8")
    store.send(signal.SIGSTOP)
    try:
        first, second = (await asyncio.to_thread(cluster.do, "read"))["places"]
    finally:
        store.send(signal.SIGCONT)
    assert first == second, "both have mapped the same memory"


async def test_a_node_that_falls_silent_and_returns_costs_no_token(cluster: NodesOfOneMachine) -> None:
    """It stands still with all that runs there: connections are there, and nothing comes."""
    head, store = cluster.nodes[0], cluster.node_of("store")
    silent = next(node for node in cluster.nodes if node not in (head, store))
    urls = await others(cluster, silent)
    expected = {model: await ask(urls[0], body(model, 1, 60)) for model in MODELS}
    long = {model: await ask(urls[0], body(model, 2, 600)) for model in MODELS}
    async with traffic(urls, expected) as took_s:
        answers = [(model, asyncio.create_task(ask(url, body(model, 2, 600)))) for url in urls for model in MODELS]
        await asyncio.sleep(0.5)
        silent.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(6.5)  # a heartbeat a second, and five that were not heard
            num_before = len(took_s)
            async with asyncio.timeout(40):  # requests are answered without it
                while len(took_s) == num_before:
                    await asyncio.sleep(0.1)
        finally:
            silent.send(signal.SIGCONT)  # soon: after a minute Ray takes it for dead, and it ends itself when it wakes
        for model, answer in answers:
            assert await answer == long[model]
    assert await returned(cluster, silent, body("r8", 1, 60)) == expected["r8"]


async def test_the_head_may_stand_still(cluster: NodesOfOneMachine) -> None:
    """Its GCS answers nobody for a while: tokens need none of it."""
    urls = await others(cluster)
    expected = {model: await ask(urls[0], body(model, 1, 60)) for model in MODELS}
    assert cluster.gcs is not None
    async with traffic(urls, expected) as took_s:
        os.kill(cluster.gcs, signal.SIGSTOP)
        try:
            await asyncio.sleep(1)
            num_before = len(took_s)
            async with asyncio.timeout(50):  # one that waits for it answers none of those that begin now
                while len(took_s) <= num_before + len(urls) * len(MODELS):
                    await asyncio.sleep(0.1)
        finally:
            os.kill(cluster.gcs, signal.SIGCONT)
    await register(urls[-1], "after", "r16")
    assert await ask(urls[0], body("after", 1, 60)) == expected["r16"]


async def test_the_node_of_the_store_may_die(cluster: NodesOfOneMachine) -> None:
    victim = cluster.node_of("store")
    assert victim is not cluster.nodes[0], "it was bound to the others: the head's death is another matter"
    urls = await others(cluster, victim)
    expected = {model: await ask(urls[0], body(model, 1, 60)) for model in MODELS}
    async with traffic(urls, expected):
        await asyncio.sleep(0.5)
        victim.send(signal.SIGKILL)
        async with asyncio.timeout(RETURN_TIMEOUT_S):
            while True:
                async with httpx.AsyncClient(timeout=60) as http:
                    answer = await http.post(f"{urls[0]}/v1/loras?wait=true", json={"name": "new", "path": "r8"})
                if answer.status_code == 201:
                    break
                assert answer.status_code == 503, answer.text
                await asyncio.sleep(0.5)
    assert await ask(urls[-1], body("new", 1, 60)) == expected["r8"]
