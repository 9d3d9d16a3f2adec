"""Bad networks and lost nodes under traffic: no wrong token, no stream that ends early, no lost acknowledgement.

A client may notice one thing only: the death of the node whose ingress has begun its answer.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from load_tests.chaos.__main__ import RANKS, bodies
from load_tests.chaos.recovery import Recoveries
from load_tests.chaos.registrations import Registrations
from load_tests.chaos.traffic import ProxyOutages, Traffic, ask
from load_tests.process_tree import processes
from tests.e2e.network.conftest import NUM_NODES, URL, Nodes
from tests.e2e.network.machines import Link

HEAD = 0
NUM_STREAMS, NUM_REQUESTS = 8, 21
#: An answer that takes longer has hung, seconds.
SLOWEST_S = 120.0
#: How long everything may take to work again, seconds.
SETTLE_S = 240.0
#: How long a node is away whose clients are to notice it without its return.
AWAY_S = 40.0
PROBE = {"prompt": "the quick", "max_tokens": 24, "temperature": 0.0, "seed": 1, "ignore_eos": True}


@asynccontextmanager
async def traffic(nodes: Nodes) -> AsyncIterator[ProxyOutages]:
    """Requests and changes of names for as long as it is entered, and until everything works; all are checked.

    Yields where the death of a node is recorded.
    """
    outages = ProxyOutages()
    haproxy = Path(nodes.environment["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
    recoveries = Recoveries(URL, haproxy, nodes.session_ids, NUM_NODES, next(iter(RANKS)), outages.clock)
    requests = Traffic(URL, bodies(random.Random(0), NUM_REQUESTS), outages, seed=0)
    changes = Registrations(URL, [*RANKS], seed=0, prefix=f"{uuid.uuid4().hex[:8]}-")
    async with httpx.AsyncClient(base_url=URL, timeout=60) as http:
        expected = {name: await ask(http, PROBE | {"model": name}) for name in RANKS}
    await requests.learn()
    async with asyncio.TaskGroup() as group:
        group.create_task(requests.run(NUM_STREAMS))
        group.create_task(changes.run())
        await asyncio.sleep(2)
        yield outages
        missing = await recoveries.settle(SETTLE_S)
        requests.stop()
        changes.stop()
    assert not missing, f"{missing} do not work after {SETTLE_S:g} s"
    await changes.check(PROBE, expected)
    await requests.compare()
    print(dict(requests.ended), dict(changes.ended), f"slowest {requests.slowest_s:.1f} s", outages.longest_s)
    assert [*requests.wrongs, *changes.wrongs, *changes.lost] == []
    assert changes.ended["POST 201"]
    assert requests.slowest_s < SLOWEST_S


@pytest.mark.parametrize("direction", ["to the others", "from the others"])
async def test_a_worker_is_cut_off_in_one_direction_for_ten_seconds(nodes: Nodes, direction: str) -> None:
    with nodes.network.enter(HEAD):
        worker = 1 if nodes.node_of("store") != 1 else 2
        pairs = [(worker, other) for other in range(NUM_NODES) if other != worker]
        async with traffic(nodes):
            cut = pairs if direction == "to the others" else [(other, worker) for worker, other in pairs]
            await degrade(nodes, cut, Link(loss=1.0), 10)


async def test_packets_are_lost_and_late(nodes: Nodes) -> None:
    with nodes.network.enter(HEAD):
        pairs = [(one, other) for one in range(NUM_NODES) for other in range(NUM_NODES) if one != other]
        async with traffic(nodes):
            await degrade(nodes, pairs, Link(loss=0.02, delay_s=0.2), 30)


async def test_the_objects_of_adapters_are_lost_with_the_node_of_the_store(nodes: Nodes) -> None:
    with nodes.network.enter(HEAD):
        async with asyncio.timeout(SETTLE_S):
            while not (
                place := nodes.node_of("store")
            ):  # Ray chooses a node, which may be the head, and starts it again
                for pid in nodes.pids(HEAD, "store"):
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(2)
        nodes.wait_until_ready()
        async with traffic(nodes) as outages:
            await lose(nodes, place, outages, AWAY_S)


async def test_a_node_is_lost_during_a_rolling_upgrade(nodes: Nodes) -> None:
    with nodes.network.enter(HEAD):
        old = set(processes(*nodes.session_ids())["engine"])
        async with traffic(nodes) as outages:
            engine = nodes.document["applications"][0]["args"]["engine"]
            engine["max_num_seqs"] = 25 - engine.get("max_num_seqs", 1)
            await asyncio.to_thread(nodes.deploy)
            async with asyncio.timeout(SETTLE_S):
                while not set(processes(*nodes.session_ids())["engine"]) - old:
                    await asyncio.sleep(0.2)
            place = next(number for number in range(1, NUM_NODES) if old.intersection(nodes.pids(number, "engine")))
            await lose(nodes, place, outages, 5)
            async with asyncio.timeout(SETTLE_S):
                while old.intersection(processes(*nodes.session_ids())["engine"]):
                    await asyncio.sleep(0.5)


async def degrade(nodes: Nodes, pairs: list[tuple[int, int]], link: Link, seconds: float) -> None:
    """Replace the links of these pairs (from, to) of nodes for some time."""
    nodes.network.links = dict.fromkeys(pairs, link)
    try:
        await asyncio.sleep(seconds)
    finally:
        nodes.network.links = {}


async def lose(nodes: Nodes, number: int, outages: ProxyOutages, away_s: float) -> None:
    """Cut a node off and kill it, so that none of its connections is closed; start it again after a while."""
    outages.record_kill("node")
    pairs = [(number, other) for other in range(NUM_NODES) if other != number]
    nodes.network.links = dict.fromkeys([*pairs, *((other, one) for one, other in pairs)], Link(loss=1.0))
    await asyncio.to_thread(nodes.kill, number)
    await asyncio.sleep(away_s)
    nodes.network.links = {}
    nodes.start(number)
