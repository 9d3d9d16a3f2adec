"""The node of the adapter store is lost and replaced, then the head dies and returns: nothing registered is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import httpx

from load_tests.process_tree import processes
from tests.e2e.cluster.conftest import NodesOfOneMachine
from tests.e2e.cluster.test_head import register_at_last
from tests.e2e.cluster.test_nodes import MODELS, ask, body, register, returned, traffic

#: How long the service may take to answer so many requests, or to be whole again, seconds.
TIMEOUT_S = 300.0
#: Requests that are answered through each living ingress, of each model, before the next thing happens.
NUM_ANSWERS = 3


async def more_answers(took_s: Sequence[float], number: int) -> None:
    """Wait until traffic has been answered so many times more."""
    wanted = len(took_s) + number
    async with asyncio.timeout(TIMEOUT_S):
        while len(took_s) < wanted:
            await asyncio.sleep(0.1)


async def whole(cluster: NodesOfOneMachine) -> None:
    """Wait until each node has an ingress that answers, and an engine's process."""
    for node in cluster.nodes:
        await returned(cluster, node, body("tiny", 1, 60))
        async with asyncio.timeout(TIMEOUT_S):
            while not set(node.processes()).intersection(processes(cluster.process.pid)["engine"]):
                await asyncio.sleep(0.5)


async def served(url: str) -> set[str]:
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.get(f"{url}/v1/models")
        assert answer.status_code == 200, answer.text
        return {model["id"] for model in answer.json()["data"]}


async def test_the_store_s_node_is_lost_and_then_the_head_while_tokens_flow(lasting_cluster: NodesOfOneMachine) -> None:
    cluster = lasting_cluster
    head, lost = cluster.nodes[0], cluster.node_of("store")
    assert lost != head, "it was bound to the others"
    place = cluster.nodes.index(lost)
    lasting = next(node for node in cluster.nodes if node not in (head, lost))
    doors = {node: await cluster.ingress_url(node) for node in cluster.nodes}
    url, closed = doors[lasting], set[str]()
    for name in MODELS[1:]:
        await register(url, name, name)
    expected = {model: await ask(url, body(model, 1, 60)) for model in MODELS}
    each = NUM_ANSWERS * len(MODELS)
    async with traffic([*doors.values()], expected, closed) as took_s:
        await more_answers(took_s, each * len(doors))
        closed.add(doors[lost])
        lost.send(signal.SIGKILL)
        await more_answers(took_s, each * 2)
        await register_at_last(url, "after-node", "r8")
        assert await ask(doors[head], body("after-node", 1, 60)) == expected["r8"]
        await asyncio.to_thread(cluster.do, f"replace {place}")
        await whole(cluster)
        new = await cluster.ingress_url(cluster.nodes[place])
        async with traffic([new], expected, closed) as new_took_s:
            closed.add(doors[head])
            await asyncio.to_thread(cluster.do, "kill head")
            assert cluster.gcs is None
            await asyncio.gather(more_answers(took_s, each), more_answers(new_took_s, each))
            await asyncio.to_thread(cluster.do, "start head")
            await register_at_last(new, "after-head", "r16")
            await whole(cluster)
    known = {"r8": "r8", "r16": "r16", "after-node": "r8", "after-head": "r16"}
    for node in cluster.nodes:
        door = await cluster.ingress_url(node)
        assert known.keys() <= await served(door)
        for name, contents in known.items():
            assert await ask(door, body(name, 1, 60)) == expected[contents]
