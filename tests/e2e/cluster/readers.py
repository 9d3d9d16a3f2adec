"""Two processes of one node that want the same adapter, as two engine replicas would.

In: a node, a service's settings, an adapter's name. Out: where in memory each of them found the bytes. The
first has them from the store. The second gets the store's answer, too, but reads its bytes only when it is told to: the
store's node may stand still by then.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.config import load_config
from app.deployments.replica.adapter_fetcher import AdapterFetcher, fetch_packed
from app.deployments.store.actor import store_actor, store_service
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.adapters.card import AdapterRef

TIMEOUT_S = 60.0


class Answered(StoreService[SharedAdapter]):
    """The store's answer, kept."""

    def __init__(self, shared: SharedAdapter) -> None:
        self._shared = shared

    async def fetch(self, ref: AdapterRef, again: bool = False) -> SharedAdapter:  # noqa: ARG002
        return self._shared

    async def invalidate(self, digest: str) -> None:
        raise AssertionError(f"the bytes of {digest} are not on this node")


class Reader:
    """An actor that reads adapters as an engine replica does."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._store = store_service(store_actor(load_config(settings)))

    async def ask(self, name: str) -> None:
        """Have the store's answer, and none of the bytes."""
        entry = (await self._store.describe(name, tenant_id="default")).entry
        assert entry is not None
        self._ref, self._answer = entry.ref, Answered(await fetch_packed(self._store, entry.ref))

    async def read(self) -> tuple[str, int]:
        """Have the bytes: the file that is mapped, by its device and inode, and the place of the first matrix in it."""
        adapter = await AdapterFetcher(self._answer, time.monotonic).fetch(self._ref)
        first = next(iter(adapter.weights.values())).a
        return place_of(first.__array_interface__["data"][0])


class TwoReaders:
    """Both are on the node; the first has read."""

    def __init__(self, node_id: str, settings: dict[str, Any], name: str) -> None:
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        remote: Any = ray.remote(Reader)
        self._readers = [remote.options(num_cpus=0, scheduling_strategy=where).remote(settings) for _ in range(2)]
        ray.get([reader.ask.remote(name) for reader in self._readers], timeout=TIMEOUT_S)
        self._first = ray.get(self._readers[0].read.remote(), timeout=TIMEOUT_S)

    def read(self) -> list[tuple[str, int]]:
        """Have the second read. Returns the places of both; they end."""
        places = [self._first, ray.get(self._readers[1].read.remote(), timeout=TIMEOUT_S)]
        for reader in self._readers:
            ray.kill(reader)
        return places


def place_of(address: int) -> tuple[str, int]:
    """The file behind an address of this process (device and inode), and the address's place in it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, device, inode, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            assert inode != "0", "it is memory of this process alone"
            return f"{device} {inode}", int(offset, 16) + address - first
    raise AssertionError(f"nothing is mapped at {address:#x}")
